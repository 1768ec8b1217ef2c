"""The program that compares fm3q.py with CleanMARL: the same game, equal flags."""

import numpy as np
import pytest
import torch
import tyro

from algorithms import fm3q
from benchmarks import speed_marl
from envs.two_team import TabularGame, arat_game


def test_one_game_is_the_batched_game():
    """From every state: the same reward, and the same next state for the same uniform number."""
    rewards, transitions, teams = arat_game("large")
    batched = TabularGame(rewards, transitions, teams, 50, seed=0, device="cpu")
    batched.states = torch.arange(50)
    batched.clock = torch.zeros(50, dtype=torch.long)
    uniform = torch.rand(50, 1, generator=batched.generator.clone_state())
    actions = torch.randint(4, (50, 6), generator=torch.Generator().manual_seed(3))
    expected, _, (_, next_states) = batched.step(actions)

    class Given:
        def random(self, dtype):
            return np.float32(uniform[state, 0].item())

    game, random = speed_marl.OneGame(), np.random.default_rng(1)
    for state in range(50):
        game.random, game.state, game.clock = Given(), state, 0
        observation, reward, ended, cut, _ = game.step(actions[state])
        assert reward == expected[state].item() and not ended and not cut
        assert (game.get_state() == next_states[state].numpy()).all()
        assert (observation[:, :50] == game.get_state()).all() and (observation[:, 50:] == np.eye(6)).all()
    game.random = random
    game.reset()
    assert [game.step(game.sample())[3] for _ in range(20)] == [False] * 19 + [True]


@pytest.mark.parametrize("mixer, every, batch", speed_marl.CASES)
@pytest.mark.parametrize("games", [1, 2048])
def test_flags_say_equal_work(mixer, every, batch, games):
    """Both sides' flags in the same units: fm3q.py counts transitions and steps of all games, qmix.py episodes."""
    _, *ours = speed_marl.words(mixer, every, batch, games, 4096)
    args = tyro.cli(fm3q.Args, args=ours)
    fm3q.check_args(args)
    assert args.updates_per_step == (games / every if every else 0)
    _, *theirs = speed_marl.words(mixer, every, batch, 0, 4096)
    peer = dict(zip(theirs[::2], theirs[1::2]))
    unit = 20 if mixer == "qmix" else 1
    assert int(peer["--batch-size"]) * unit == args.batch_size
    assert int(peer["--buffer-size"]) * unit == args.buffer_size
    assert int(peer["--train-freq"]) == (every // unit if every else speed_marl.NEVER)
    assert peer["--target-network-update-freq"] == peer["--train-freq"] and args.target_network_frequency == 1
    assert float(peer["--polyak"]) == args.tau and int(peer["--hidden-dim"]) == args.hidden_size
    assert float(peer["--clip-gradients"]) == args.max_grad_norm
    assert peer["--learning-rate"] == str(args.learning_rate) and peer["--end-e"] == str(args.end_e)


def test_a_tiny_run_counts_steps_and_updates():
    found = speed_marl.run_ours(speed_marl.words("vdn", 32, 8, 32, 640))
    assert (found["steps"], found["updates"]) == (640, 20)
    assert 0 < found["update_seconds"] < found["seconds"]
