"""Scores of the shipped player of text games before any training: results/tiny_text_games.csv.

python benchmarks/score_text_games.py --minutes 24      # minutes that envs/tiny_lm/pretrain.py took, as it printed
"""

import copy
import csv
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import grpo
from envs import game_solvers as solvers
from envs.game import Game
from envs.game_demonstrations import observations, random_action
from envs.text_games import make_game

ROOT = Path(__file__).resolve().parents[1]
GAMES = {
    "tictactoe": ("tictactoe", {}),
    "kuhn": ("kuhn", {}),
    "kuhn_spiral": ("kuhn", {"variant": "spiral"}),
    "kuhn_textarena": ("kuhn", {"variant": "textarena"}),
    "negotiation": ("negotiation", {}),
}


@dataclass
class Args:
    minutes: float
    """minutes of pretraining"""
    command: str = "python envs/tiny_lm/pretrain.py --env text_games --vocab-size 640"
    """command of pretraining"""
    device: str = "CPU, 1 thread"
    """machine of pretraining"""
    model: str = "envs/tiny_lm/text_games"
    """model to score"""
    games: int = 512
    """games of each kind and seat"""
    samples: int = 1024
    """completions at each information set of Kuhn poker"""
    out: str = "benchmarks/results/tiny_text_games.csv"
    """CSV to write"""


class Writer:
    """The model: writes a turn for many games at once."""

    def __init__(self, path: Path):
        self.flags = grpo.Args(model_name_or_path=str(path), max_completion_length=48)
        self.model, self.tokenizer = grpo.load_model(self.flags)
        self.tokens = self.turns = 0

    def __call__(self, games: list[Game], generator: random.Random) -> list[str]:
        texts = []
        for start in range(0, len(games), 128):
            batch = games[start : start + 128]
            chats = [game.prompt(game.player) for game in batch]
            prompts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
            seeds = [generator.getrandbits(63) for _ in batch]
            rows = [sample.ids for sample in grpo.generate(self.model, prompts, self.flags, seeds)]
            self.tokens, self.turns = self.tokens + sum(map(len, rows)), self.turns + len(rows)
            texts += self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts


def random_writer(games: list[Game], generator: random.Random) -> list[str]:
    return [f"\\boxed{{{random_action(game, generator)}}}" for game in games]


def minimax_writer(games: list[Game], generator: random.Random) -> list[str]:
    return [solvers.minimax_action(game.board, generator) for game in games]


def play(name: str, seats: tuple[Callable, Callable], count: int, seed: str) -> list[Game]:
    """`count` games played to the end, player 0 by the first writer, player 1 by the second."""
    generator, games = random.Random(seed), [make_game(GAMES[name][0], **GAMES[name][1]) for _ in range(count)]
    for game in games:
        game.reset(generator)
    while any(not game.done for game in games):
        waiting = [[game for game in games if not game.done and game.player == player] for player in (0, 1)]
        for player in (0, 1):
            for game, text in zip(waiting[player], seats[player](waiting[player], generator)):
                game.step(text)
    return games


def against(name: str, writer: Writer, opponent: Callable, label: str, count: int) -> dict[str, float]:
    """Shares of won, drawn and lost games in each seat; a forfeit is a loss."""
    scores = {}
    for seat in (0, 1):
        pair = (writer, opponent) if seat == 0 else (opponent, writer)
        games = play(name, pair, count, f"{name} {label} {seat}")
        margins = [(game.rewards[seat] - game.rewards[1 - seat]) for game in games]
        for key, test in (("win", lambda x: x > 0), ("draw", lambda x: x == 0), ("loss", lambda x: x < 0)):
            scores[f"{label}_seat{seat}_{key}"] = sum(map(test, margins)) / count
    return scores


def read_out_kuhn(writer: Writer, samples: int) -> dict[str, float]:
    """Exact NashConv of the sampled policy; its thoughts are marginalised by sampling, illegal texts left out."""
    policy, illegal = {}, 0
    for name, game in solvers.kuhn_decision_points():
        texts = writer([game] * samples, random.Random(f"kuhn {name}"))
        actions = [game.parse(text) for text in texts]
        counts = [actions.count(action) for action in game.legal_actions()]
        policy[name] = counts[1] / max(sum(counts), 1)
        illegal += samples - sum(counts)
    return {"nash_conv": solvers.kuhn_nash_conv(policy), "illegal_mass": illegal / samples / len(policy)}


def lines_seen(writer: Writer, count: int) -> float:
    """Share of right answers where the model's thought names winning or threatening cells and there are some."""
    generator, games, right = random.Random("lines"), [], []
    while len(games) < count:  # a random position of a random game
        game = make_game("tictactoe")
        game.reset(generator)
        boards = []
        while not game.done:
            boards.append(copy.copy(game))
            game.step(random_action(game, generator))
        games.append(generator.choice(boards))
    for game, text in zip(games, writer(games, generator)):
        for sentence in observations(game)[0][3:]:
            named = re.search(rf"{sentence.split()[0]} \w+\.", text)
            if named and "none" not in sentence:
                right.append(named[0] == sentence)
    return sum(right) / max(len(right), 1)


def main(args: Args) -> None:
    writer, rows = Writer(ROOT / args.model), []
    common = {"minutes": args.minutes, "parameters": sum(p.numel() for p in writer.model.parameters())}
    common |= {"torch": version("torch"), "transformers": version("transformers")}
    common |= {"command": args.command, "device": args.device}
    for name in GAMES:
        writer.tokens = writer.turns = 0
        games = play(name, (writer, writer), args.games, f"{name} self")
        broken = sum(game.reason in ("forfeit", "rejected") for game in games)
        scores = {"legal": 1 - broken / writer.turns, "finished": 1 - broken / args.games}
        scores |= {"turns": writer.turns / args.games, "tokens": writer.tokens / writer.turns}
        scores |= against(name, writer, random_writer, "random", args.games)
        if name == "tictactoe":
            scores |= against(name, writer, minimax_writer, "minimax", args.games)
            scores |= {"lines": lines_seen(writer, 4 * args.games)}
        if name == "kuhn":
            scores |= read_out_kuhn(writer, args.samples)
        for score, value in scores.items():
            rows.append({"game": name, "score": score, "value": f"{value:.4f}", **common})
            print(name, score, f"{value:.3f}", flush=True)
    with (ROOT / args.out).open("w", newline="") as file:
        csv_writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        csv_writer.writeheader()
        csv_writer.writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
