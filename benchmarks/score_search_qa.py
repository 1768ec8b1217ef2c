"""Scores of the shipped search model before any training, in all of its roles: results/tiny_search_qa.csv.

python benchmarks/score_search_qa.py --minutes 25      # minutes that envs/tiny_lm/pretrain.py took, as it printed
"""

import csv
import random
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import grpo
from envs import search_text
from envs.search_demonstrations import role_demonstration
from envs.search_qa import Request, SearchQA, world

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Args:
    minutes: float
    """minutes of pretraining"""
    command: str = "python envs/tiny_lm/pretrain.py --env search_qa --steps 3500 --vocab-size 768"
    """command of pretraining"""
    model: str = "envs/tiny_lm/search_qa"
    """model to score"""
    problems: int = 256
    """evaluation problems of each number of hops"""
    out: str = "benchmarks/results/tiny_search_qa.csv"
    """CSV to write"""


class Player:
    """Writes the next message of many chats at once."""

    def __init__(self, path: Path):
        self.flags = grpo.Args(model_name_or_path=str(path), max_completion_length=40)
        self.model, self.tokenizer = grpo.load_model(self.flags)

    def write(self, chats: list[list[dict]], greedy: bool = False) -> list[str]:
        texts = []
        for start in range(0, len(chats), 128):
            batch = chats[start : start + 128]
            prompts = self.tokenizer.apply_chat_template(batch, add_generation_prompt=True, return_dict=True)["input_ids"]
            seeds = [grpo.random_seed(len(chat), i) for i, chat in enumerate(batch, start)]
            samples = grpo.generate(self.model, prompts, self.flags, None if greedy else seeds)
            texts += self.tokenizer.batch_decode([sample.ids for sample in samples], skip_special_tokens=True)
        return texts

    def play(self, task: SearchQA, chats: list[list[dict]], greedy: bool = False) -> list[list[str]]:
        """Episodes of a searching agent: the texts of each chat's turns."""
        turns, live = [[] for _ in chats], list(range(len(chats)))
        chats = [list(chat) for chat in chats]
        for turn in range(1, task.max_turns + 1):
            texts = self.write([chats[i] for i in live], greedy)
            for i, text, reply in zip(list(live), texts, task.step(texts, turn)):
                turns[i].append(text)
                if reply is None:
                    live.remove(i)
                else:
                    chats[i] += [{"role": "assistant", "content": text}, reply]
            if not live:
                break
        return turns


def share(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def score(player: Player, hops: int, count: int) -> dict[str, float]:
    """Every score on the evaluation problems of one number of hops."""
    task, generator = SearchQA(hops=(hops,)), random.Random(f"scores {hops}")
    problems, scores = task.evaluation_problems(count), {}
    episodes = player.play(task, [task.prompt(problem) for problem in problems])
    cases = list(zip(problems, map("".join, episodes)))
    for name, function in task.reward_functions.items():
        scores[name] = share(function(*case) for case in cases)
    scores["searches"] = share(sum("<search>" in text for text in turns) for turns in episodes)
    greedy = player.play(task, [task.prompt(problem) for problem in problems], greedy=True)
    scores["greedy"] = share(search_text.exact_match(p, "".join(turns)) for p, turns in zip(problems, greedy))
    privileged = player.play(
        task, [task.prompt(replace(problem, privileged=task.qcp(problem))) for problem in problems]
    )
    scores["privileged"] = share(search_text.exact_match(p, "".join(turns)) for p, turns in zip(problems, privileged))
    unread = player.write([task.prompt(problem, "responder") for problem in problems])
    scores["no_search"] = share(map(search_text.exact_match, problems, unread))

    # The team: the router in states that its demonstrations reach, the others after the right searches so far.
    facts, paths = [world().sentence(*p.path[-1][:2]) for p in problems], [task.path_steps(p) for p in problems]
    chats = [role_demonstration(task, problem, "router", "", generator)[0] for problem in problems]
    enough = [fact in chat[0]["content"] for fact, chat in zip(facts, chats)]
    scores["router"] = share(search_text.sufficient(text) == truth for text, truth in zip(player.write(chats), enough))
    router = [(("Router", f"<think>next: {p.path[-1][1]}</think><verify>no</verify>"),) for p in problems]
    chats = [task.prompt(p, "searcher", path[:-1], text) for p, path, text in zip(problems, paths, router)]
    found = task.search([search_text.parse_turn(text)[1] for text in player.write(chats)])
    scores["searcher"] = share(fact in result for fact, result in zip(facts, found))
    chats = [task.prompt(problem, "responder", path) for problem, path in zip(problems, paths)]
    scores["responder"] = share(map(search_text.exact_match, problems, player.write(chats)))

    # The examiner: a question that can be read, whose answer is right.
    documents = [task.document(generator) for _ in problems]
    walks = player.play(task, [task.prompt(Request(document, hops)) for document in documents])
    written = [search_text.parse_question(turns[-1]) for turns in walks]
    scores["question"] = share(found is not None for found in written)
    scores["question_right"] = share(found is not None and answer_of(found[0]) == found[1] for found in written)
    return scores


def answer_of(question: str) -> str | None:
    """The true answer of a question of the world, None if it is not one."""
    chain, _, person = question.removesuffix("?").rpartition(" of ")
    for relation in chain.removeprefix("Who is the ").split(" of the ")[::-1]:
        person = world().lookup(person, relation)
    return person


def main(args: Args) -> None:
    player, rows = Player(ROOT / args.model), []
    common = {"minutes": args.minutes, "parameters": sum(p.numel() for p in player.model.parameters())}
    common |= {"torch": version("torch"), "transformers": version("transformers")}
    common |= {"command": args.command, "device": "CPU, 1 core"}
    for hops in (1, 2, 3, 4):
        for name, value in score(player, hops, args.problems).items():
            rows.append({"score": name, "hops": hops, "value": f"{value:.4f}", **common})
            print(hops, name, f"{value:.3f}", flush=True)
    with (ROOT / args.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
