"""Episodes of a trained run as an animated GIF: arac, fm3q (pong), spiral_rae, unimodal_poisson.

    python algorithms/arac.py --output-dir runs/arac
    python benchmarks/animate.py runs/arac --output arac.gif

Three episodes with seeds 1, 2 and 3; of PPO one, with the seed of the script's evaluation. Policies
of arac and spiral_rae are sampled, those of fm3q and unimodal_poisson take their best actions.
"""

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository root

CPU = torch.device("cpu")


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """run folder of a training that has ended"""
    output: str = "episode.gif"
    """GIF to write"""


# --- Each script's episodes: a yield is a picture, which is shown for so many seconds -----------


def draw_arac(figure: Figure, run: str, saved: dict, steps: int) -> Iterator[float]:
    """The reference on the left, the trained team on the right, from the same starts."""
    from algorithms import arac

    args = arac.Args(**saved)
    game = arac.make_games(args, args.graph[:1], CPU)[0]
    policy = arac.GraphPolicy(*arac.network_sizes(game, 0, args))
    policy.load_state_dict(arac.load_checkpoint(run, CPU)["policy"])
    players = {
        f"reference: {args.reference}": lambda game: game.scripted(args.reference, game.positions),
        f"ARAC after {steps:,} steps": lambda game: arac.act(policy, game, 0),
    }
    starts = game.starts
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        game.starts = starts[seed - 1 : seed]
        games = [arac.play(game, choose, seed) for choose in players.values()]
        last = max(len(path) for _, _, path in games) - 1
        for step in range(last + 1):
            for column, (name, (result, _, path)) in enumerate(zip(players, games)):
                now = min(step, len(path) - 1)
                words = f"step {now}"
                if now == len(path) - 1:
                    words += ": won" if result > 0 else ": not won"
                axes = figure.add_axes((0.01 + column / 2, 0.01, 0.48, 0.82))
                axes.axis("off")
                draw_graph(axes, game.graph, path[now].tolist(), game.teams[0])
                axes.set_title(f"{name}\n{words}")
            yield 2.0 if step == last else 0.35


def draw_graph(axes, graph, nodes: list[int], first_team: int) -> None:
    """The graph in grey, players of the first team blue, the others orange, side by side."""
    n = graph.num_nodes
    turns = torch.arange(n) * 2 * torch.pi / n
    circle = torch.stack([turns.sin(), -turns.cos()], 1)  # where a file has no coordinates
    spots = (circle if graph.coordinates is None else graph.coordinates).float()  # (n,2)
    spots = spots - spots.amin(0)
    spots = (spots - spots.amax(0) / 2) / spots.max()
    for ends in spots[graph.edges].tolist():
        axes.plot(*zip(*ends), color="0.75", linewidth=1, zorder=1)
    axes.scatter(*spots.T.tolist(), s=14, color="0.45", zorder=2)
    for player, node in enumerate(nodes):
        if node >= 0:
            here = [other for other, place in enumerate(nodes) if place == node]
            aside = 0.05 * (here.index(player) - (len(here) - 1) / 2)
            colour = "tab:orange" if player >= first_team else "tab:blue"
            x, y = spots[node].tolist()
            axes.scatter(x + aside, y, s=90, color=colour, edgecolors="white", zorder=3)
    axes.set(xlim=(-0.6, 0.6), ylim=(0.6, -0.6), aspect="equal")


def draw_fm3q(figure: Figure, run: str, saved: dict, steps: int) -> Iterator[float]:
    """Rallies of the trained team, blue, against random moves, ball followers and itself."""
    from algorithms import fm3q
    from envs.pong import tracker

    args = fm3q.Args(**saved)
    if args.env_id != "pong":
        sys.exit(f"{run}: {args.env_id} has no pictures; train with --env-id pong")
    team = fm3q.player(fm3q.load_teams(run, args, CPU))
    others = {"random moves": fm3q.wanderer, "ball followers": tracker, "itself": team}
    for seed, (name, other) in enumerate(others.items(), 1):
        game = fm3q.make_game(args, 1, seed, CPU)
        over = False
        while not over:
            figure.suptitle(f"FM3Q after {steps:,} steps (blue)\nagainst {name}")
            axes = figure.add_axes((0, 0, 1, 400 / 450))  # two pixels for each of the picture
            axes.axis("off")
            axes.imshow(game.picture().numpy(), interpolation="nearest")
            reward, _, over, _ = game.step(fm3q.both_teams(game, team(game), other(game)))
            if over:
                words = {1: "blue wins", -1: "orange wins", 0: "no winner in 300 steps"}
                axes.text(100, 100, words[int(reward)], color="white", ha="center", size=16)
            yield 1.5 if over else 0.07


def draw_spiral_rae(figure: Figure, run: str, saved: dict, steps: int) -> Iterator[float]:
    """Tic-tac-toe: first and second against random moves, then first against perfect play."""
    from algorithms import spiral_rae

    args = replace(spiral_rae.Args(**saved), model_name_or_path=f"{run}/final")
    model, tokenizer = spiral_rae.load_model(args)
    names = {"policy": "trained model", "random": "random player", "minimax": "perfect player"}
    matches = [("policy", "random"), ("random", "policy"), ("policy", "minimax")]
    for seed, players in enumerate(matches, 1):
        match = spiral_rae.new_match("tictactoe", players, str(seed), args)
        spiral_rae.play({"policy": model}, tokenizer, [match], args)
        game = spiral_rae.new_match("tictactoe", players, str(seed), args).game  # to play it again
        both = [f"{names[player]} ({mark})" for player, mark in zip(players, "OX")]
        for text in match.texts:
            role = game.player
            before = game.board
            written = text.partition(": ")[2]  # after "Player 0, policy: "
            game.step(written)
            figure.suptitle(f"SPIRAL after {steps} steps: {' against '.join(both)}")
            draw_board(figure, before, game.board)
            colour = "tab:blue" if players[role] == "policy" else "tab:orange"
            figure.text(0.47, 0.74, f"{both[role]} writes", color=colour, size=12)
            lines = "\n".join(textwrap.wrap(written, 35)[:9])
            figure.text(0.47, 0.68, lines, va="top", family="monospace", parse_math=False)
            if game.done:
                ends = {"win": f"{both[role]} wins", "draw": "a draw"}
                words = ends.get(game.reason, f"{game.reason} by {both[role]}")
                figure.text(0.47, 0.1, words, size=13)
            yield 3.0 if game.done else 1.4


def draw_board(figure: Figure, before: str, after: str) -> None:
    """Nine cells, the new mark on a yellow ground."""
    axes = figure.add_axes((0.02, 0.05, 0.42, 0.8), xlim=(0, 3), ylim=(3, 0), aspect="equal")
    axes.set(xticks=[1, 2], yticks=[1, 2], xticklabels=[], yticklabels=[])
    axes.grid(color="black")
    for cell, mark in enumerate(after):
        x, y = cell % 3, cell // 3
        if mark != before[cell]:
            axes.fill_between([x, x + 1], y, y + 1, color="#fff0b0")
        text, size, colour = (cell, 10, "tab:gray") if mark == "." else (mark, 34, "black")
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", size=size, color=colour)


def draw_unimodal_poisson(figure: Figure, run: str, saved: dict, steps: int) -> Iterator[float]:
    """Eight seconds of an episode, and the policy of the first six dimensions of the action."""
    from algorithms import unimodal_poisson as ppo

    args = ppo.Args(**saved)
    envs = ppo.make_envs(args, 1)
    body = envs.envs[0].unwrapped  # a MuJoCo task of gymnasium
    agent = ppo.Agent(envs, args).requires_grad_(False)
    agent.load_state_dict(ppo.load_checkpoint(run, CPU)["agent"])
    observations, _ = envs.reset(seed=args.seed + 10_000)
    every = max(1, round(0.08 / body.dt))
    for step in range(int(8 / body.dt)):
        outputs = agent.outputs(agent.normalize(observations))
        if step % every == 0:
            figure.suptitle(f"PPO, {args.policy} policy, after {steps:,} steps: {args.env_id}")
            draw_body(figure, body)
            for number, heights in enumerate(agent.head.logits(outputs)[0, :6].softmax(-1)):
                place = (0.06 + 0.15 * number, 0.03, 0.13, 0.17)
                axes = figure.add_axes(place, ylim=(0, 0.6), xticks=[], yticks=[])
                axes.bar(range(args.num_atoms), heights, width=0.9)
                axes.set_title(body.model.actuator(number).name, size=10, pad=3)
            yield every * body.dt
        actions = agent.head.to_env(agent.head.mode(outputs)).numpy()
        observations, _, terminated, truncated, _ = envs.step(actions)
        if terminated[0] or truncated[0]:
            break


def draw_body(figure: Figure, body) -> None:
    """Capsules and spheres from the side, four metres by 1.7; geom 0 is the floor."""
    model = body.model
    middle = body.data.xpos[1, 0]  # of the torso
    axes = figure.add_axes((0.04, 0.34, 0.92, 0.576), ylim=(-0.1, 1.6), yticks=[])
    axes.set_xlim(middle - 2, middle + 2)
    axes.set_xticks(np.arange(np.ceil(middle - 2), middle + 2))
    axes.xaxis.set_major_formatter("{x:.0f} m")
    axes.axhline(0, color="black", lw=1)
    points_a_metre = axes.get_window_extent().width * 72 / figure.dpi / 4
    for geom in range(1, model.ngeom):
        axis = body.data.geom_xmat[geom].reshape(3, 3)[:, 2] * model.geom_size[geom, 1]
        ends = body.data.geom_xpos[geom] + [[-1], [1]] * axis  # (2,3)
        width = 2 * model.geom_size[geom, 0] * points_a_metre
        colour = ("#222222", "#666666")[geom % 2]
        axes.plot(ends[:, 0], ends[:, 2], color=colour, lw=width, solid_capstyle="round")


DRAWERS = {  # by a flag that only this script has; with the size of the picture in inches
    "evader": (draw_arac, 5.6, 3.3),
    "mixer": (draw_fm3q, 4.0, 4.5),
    "games": (draw_spiral_rae, 6.2, 3.2),
    "num_atoms": (draw_unimodal_poisson, 5.6, 3.8),
}


def main(args: Args) -> None:
    path = Path(args.run, "args.json")
    saved = json.loads(path.read_text()) if path.is_file() else {}
    saved.pop("checksums", None)  # no flag
    known = [drawer for flag, drawer in DRAWERS.items() if flag in saved]
    checkpoints = sorted(Path(args.run).glob("checkpoints/step_*"))
    if not known or not checkpoints:
        sys.exit(f"{args.run}: no run of arac, fm3q, spiral_rae or unimodal_poisson that has ended")
    draw, width, height = known[0]
    figure = Figure((width, height), dpi=100)
    canvas = FigureCanvasAgg(figure)
    frames = []
    times = []
    for seconds in draw(figure, args.run, saved, int(checkpoints[-1].stem[5:])):
        canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        frames.append(picture.convert("P", dither=Image.Dither.NONE))  # one palette for all
        times.append(round(1000 * seconds))
        figure.clear()
    frames[0].save(args.output, save_all=True, append_images=frames[1:], duration=times, loop=0)
    print(f"{args.output}: {len(frames)} frames, {Path(args.output).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(tyro.cli(Args))
