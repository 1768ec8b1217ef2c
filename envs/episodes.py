"""Episodes of several turns as one sequence of tokens: what the policy wrote, what it read, and where each turn begins.

Every turn is an assistant message; what it reads next (a search result) is a user message, so any chat template works.
Used by scripts whose rows are whole episodes. Needs torch, importable alone.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass
class Episode:
    problem: object
    prompt: list[int]  # token ids
    ids: list[int] = field(default_factory=list)  # all tokens behind the prompt, as sampled and as read
    turns: list[int] = field(default_factory=list)  # turn of each token, from 0; -1 where it was read
    logprobs: list[float] = field(default_factory=list)  # of each token when it was sampled; 0 where it was read
    starts: list[int] = field(default_factory=list)  # where in ids each turn begins
    texts: list[str] = field(default_factory=list)  # what was written and read, in order
    entropy: float = 0.0  # nats, summed over the sampled tokens
    ended: bool = True  # every turn has its end token
    over: bool = False

    def context(self, turn: int | None = None) -> list[int]:
        """Token ids up to the beginning of a turn, or all of them."""
        return self.prompt + (self.ids if turn is None else self.ids[: self.starts[turn]])

    def add(self, ids: list[int], logprobs: list[float], text: str, entropy: float, ended: bool) -> None:
        """A turn of the policy."""
        self.starts.append(len(self.ids))
        self.turns += [len(self.starts) - 1] * len(ids)
        self.ids += ids
        self.logprobs += logprobs[: len(ids)]
        self.texts.append(text)
        self.entropy, self.ended = self.entropy + entropy, self.ended and ended

    def read(self, ids: list[int], text: str) -> None:
        """What the policy reads before its next turn."""
        self.turns += [-1] * len(ids)
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.texts.append(text)


def padded(episodes: list[Episode], name: str, padding: float, device: torch.device) -> Tensor:
    """A list of each episode (ids, turns, logprobs) as rows of one tensor. -> (B,T)"""
    return pad_sequence([torch.tensor(getattr(episode, name)) for episode in episodes], True, padding).to(device)


def reply_ids(tokenizer, message: dict) -> list[int]:
    """Token ids of a message that follows the end token of the assistant's, up to where the assistant begins again."""
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}, message] for text in "bc"]
    options = {"add_generation_prompt": True, "return_dict": True}
    ids, other = (tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats)
    content = max(
        i for i, pair in enumerate(zip(ids, other)) if pair[0] != pair[1]
    )  # alone, b may be written otherwise
    return ids[content + 2 :]  # behind the end token
