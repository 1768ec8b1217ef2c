"""A language model as critic of critic_search.py: --critic-model. It reads finished episodes and the right answers.

It is frozen, answers greedily, in batches, and needs no tokenizer of the policy's kind. Texts of the policy and of its
tools are shown without the control tokens of the critic.
"""

import json
import re
import sys

import torch
import transformers

PROMPT = """\
An agent was told: {prompt}
The right answer is: {answer}
What the agent wrote and read:
{episode}
Judge each of its {count} searches. A search is good if what it found is new and helps
to get to the right answer, else it is bad. Write one line for each search, such as
1: good
2: bad"""
TOKENS_AT_ONCE = 2**15  # of prompts in a batch


class LanguageCritic:
    batched = True  # it is called with lists of problems and episodes

    def __init__(self, name: str, task, device: torch.device, args):
        self.task = task
        self.settings = json.loads(args.chat_template_kwargs) | {"add_generation_prompt": True, "tokenize": False}
        self.settings.pop("tools", None)  # the agent's
        self.new_tokens = 64 + 8 * args.max_turns
        if not hasattr(task, "right_answer"):
            sys.exit(f"--env {args.env}: has no right_answer, which --critic-model is told")
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(name, padding_side="left")
            dtype = torch.bfloat16 if args.bf16 else torch.float32
            self.model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
        except Exception as error:  # of safetensors and tokenizers, too
            sys.exit(f"--critic-model {name}: cannot be loaded ({' '.join(str(error).split()):.300})")
        if self.tokenizer.chat_template is None:
            sys.exit(f"--critic-model {name}: has no chat template; use an instruct model")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**20
        self.longest = positions - self.new_tokens

    def prompt(self, problem, episode) -> str:
        """The chat in which the critic is asked about an episode, up to where it begins to write."""
        turns = []
        for number in range(episode.num_searches):
            written, read = episode.texts[2 * number : 2 * number + 2]
            turns.append(f"Search {number + 1}: {written}\nFound: {read}")
        text = PROMPT.format(
            prompt="\n".join(message["content"] for message in self.task.prompt(problem)),
            answer=" or ".join(getattr(problem, "answers", None) or [self.task.right_answer(problem)[1]]),
            episode="\n".join([*turns, f"End: {episode.texts[-1]}"]),
            count=episode.num_searches,
        )
        for token in self.tokenizer.added_tokens_decoder.values():
            text = text.replace(token.content, " ") if token.special else text
        return self.tokenizer.apply_chat_template([{"role": "user", "content": text}], **self.settings)

    @torch.no_grad()
    def __call__(self, problems: list, episodes: list) -> list[list[float | None]]:
        """A verdict on each search: 1.0, 0.0, or None if it cannot be read. An episode that is too long gets None."""
        verdicts = [[None] * episode.num_searches for episode in episodes]
        chats = {}  # of the episodes that searched
        for row, (problem, episode) in enumerate(zip(problems, episodes)):
            if episode.num_searches > 0:
                chats[row] = self.prompt(problem, episode)
        lengths = {row: len(self.tokenizer(chat, add_special_tokens=False)["input_ids"]) for row, chat in chats.items()}
        waiting = [row for row in sorted(chats, key=lengths.get) if lengths[row] <= self.longest]
        while waiting:  # the longest first, with as many as fit
            size = max(1, TOKENS_AT_ONCE // (lengths[waiting[-1]] + self.new_tokens))
            rows, waiting = waiting[-size:], waiting[:-size]
            for row, text in zip(rows, self.write([chats[row] for row in rows])):
                verdicts[row] = parse_verdicts(text, episodes[row].num_searches)
        return verdicts

    def write(self, chats: list[str]) -> list[str]:
        """What the critic writes to each chat, with the <think> that its template may have opened."""
        inputs = self.tokenizer(chats, add_special_tokens=False, padding=True, return_tensors="pt").to(self.model.device)
        settings = {"max_new_tokens": self.new_tokens, "do_sample": False, "repetition_penalty": 1.0}
        settings["pad_token_id"] = self.tokenizer.pad_token_id
        ids = self.model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings
        )
        texts = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
        opened = ["<think>" if chat.rstrip().endswith("<think>") else "" for chat in chats]
        return [start + text for start, text in zip(opened, texts)]


def parse_verdicts(text: str, count: int) -> list[float | None]:
    """What a critic says of searches 1 to count in lines like `2: bad`; None where there is no such line.

    Its thoughts do not count, and of two lines on a search the last does.
    """
    if "<think>" in text and "</think>" not in text:
        return [None] * count  # cut before it said anything
    said = text.lower().rpartition("</think>")[2]
    words = dict(re.findall(r"(\d+)\W{1,4}(good|bad)\b", said))
    numbers = {"good": 1.0, "bad": 0.0}
    return [numbers.get(words.get(str(number))) for number in range(1, count + 1)]
