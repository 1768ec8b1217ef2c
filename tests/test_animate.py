"""benchmarks/animate.py: a short run of ARAC becomes a GIF."""

from control_runs import train
from PIL import Image

from algorithms import arac
from benchmarks import animate


def test_arac(tmp_path):
    """On a cycle shortest paths never catch anybody, so each of three games is shown to its end."""
    steps = {"total_timesteps": 64, "num_envs": 8, "learning_starts": 32, "horizon": 4}
    train(arac, tmp_path / "run", **steps)
    path = tmp_path / "arac.gif"
    animate.main(animate.Args(str(tmp_path / "run"), str(path)))
    with Image.open(path) as picture:
        assert (picture.n_frames, picture.size) == (3 * 5, (560, 330))
