"""Build the tiny base model of a text environment, or teach a public model its format.

    # a shipped model; the flags of the others are in their README.md. 22 minutes on one thread
    python envs/tiny_lm/pretrain.py --env countdown --steps 3000 --learning-rate 2e-3

    # a cold start of a public model, 12 minutes on one thread
    python envs/tiny_lm/pretrain.py --env text_games --model-name-or-path smollm2 \
        --output-dir smollm2_games --steps 60 --batch-size 8 --learning-rate 1e-4 --no-compile

A base model imitates its environment's imperfect demonstrations: well-formed most of the time,
right sometimes. Tokenizer and weights (Qwen3's architecture) follow from a seed. It is stored in
Hugging Face format, so that scripts load it like any other model. A new environment is one entry in
ENVIRONMENTS: a function that draws one (messages, completion) pair from a `random.Random`, covering
every role.
"""

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import tyro
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from envs.countdown import Countdown
from envs.dilemma import make_game as make_dilemma
from envs.game_demonstrations import demonstration as text_games_demonstration
from envs.game_demonstrations import random_action
from envs.retriever import RELATIONS
from envs.search_demonstrations import demonstration as search_demonstration
from envs.search_qa import TAGS, SearchQA
from envs.tool_calls import ToolCalls

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# --- Environments: one demonstration as (chat messages, completion) -----------------------------


def countdown_demonstration(generator: random.Random) -> tuple[list[dict], str]:
    """70 % solver, 15 % verifier, 15 % solver who sees a rejected attempt; one problem in ten has
    four numbers."""
    task = Countdown(num_numbers=4 if generator.random() < 0.1 else 3)
    problem = task.sample(generator)
    role = generator.random()
    if role < 0.7:
        return task.prompt(problem), task.demonstration(problem, generator)
    attempt = task.demonstration(problem, generator)
    if generator.random() < 0.3:  # approvals would be rare otherwise
        attempts = [task.demonstration(problem, generator) for _ in range(8)]
        attempt = max(attempts, key=lambda text: " yes" in text)
    check = task.verifier_demonstration(problem, attempt, generator)
    if role < 0.85:
        return task.prompt(problem, "verifier", (("Solver", attempt),)), check
    again = task.prompt(problem, "solver", (("Solver", attempt), ("Verifier", check)))
    return again, task.demonstration(problem, generator)


def search_qa_demonstration(generator: random.Random) -> tuple[list[dict], str]:
    """Every role of the search task; half of the questions have one hop, a third two, the rest
    three."""
    return search_demonstration(SearchQA(hops=(1, 1, 1, 2, 2, 3)), generator)


def tool_calls_demonstration(generator: random.Random) -> tuple[list[dict], str]:
    """The only role: an imperfect caller of tools."""
    task = ToolCalls()
    problem = task.sample(generator)
    return task.prompt(problem), task.demonstration(problem, generator)


def dilemma_demonstration(generator: random.Random) -> tuple[list[dict], str]:
    """A turn of random players. In the prisoner's dilemma they lean to what they and the other one
    chose in the last round: a model without a reason to tell the situations apart would not look
    at them."""
    name = generator.choices(["ipd", "coins", "split"], [0.7, 0.15, 0.15])[0]
    game = make_dilemma(name)
    if name == "ipd":
        game.history = generator.choice([1, 1, 1, 10])
    state = game.start(generator)
    turns = []
    for _ in range(game.rounds):
        actions = ["", ""]
        for player in game.movers(state):
            actions[player] = dilemma_action(name, game, state, player, generator)
            turns.append((game.prompt(state, player), f"\\boxed{{{actions[player]}}}"))
        state = game.play(state, actions)
    return generator.choice(turns)


def dilemma_action(name: str, game, state, player: int, generator: random.Random) -> str:
    if name == "split":  # the kind of message first
        return random_action(state[0], generator)
    if name == "ipd" and state:
        own, other = state[-1][player], state[-1][1 - player]
        chance = {"AA": 0.75, "AB": 0.45, "BA": 0.55, "BB": 0.25}[own + other]
        return "[A]" if generator.random() < chance else "[B]"
    return game.random_action(state, player, generator)


@dataclass(frozen=True)
class Environment:
    demonstration: Callable[[random.Random], tuple[list[dict], str]]
    added_tokens: tuple[str, ...]  # tags that are one token each
    isolated: str  # regular expression of what is never merged with its neighbours


ENVIRONMENTS = {
    "countdown": Environment(
        countdown_demonstration,
        ("<answer>", "</answer>", "<verdict>", "</verdict>"),
        r"[0-9]|[-+*/()=]|\n",
    ),
    "tool_calls": Environment(
        tool_calls_demonstration,
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "</response>"),
        # names in calls, and values: the same tokens everywhere
        r"[0-9]|[A-Z][a-z]+|(?<=\"name\": \")[a-z]+|\n",
    ),
    "search_qa": Environment(
        search_qa_demonstration,
        tuple(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")),
        # a first name keeps the space behind it
        rf"[0-9]|[A-Z][a-z]+ (?=[A-Z])|[A-Z][a-z]+|{'|'.join(RELATIONS)}",
    ),
    "text_games": Environment(
        text_games_demonstration,  # every game and both seats
        ("<think>", "</think>"),
        r"[0-9]|\n|(?<![A-Za-z])"
        r"(?:[JQKOX]|check|bet|call|fold|Wood|Gold|Accept|Deny|Offer)(?![A-Za-z])",
    ),
    "dilemma": Environment(
        dilemma_demonstration,
        ("<think>", "</think>"),
        r"you [AB], they [AB]|[0-9]|\n|(?<![A-Za-z])"  # a round is one token
        r"(?:[AB]|yours|theirs|take|leave|Wood|Gold|Accept|Deny|Offer)(?![A-Za-z])",
    ),
}


@dataclass
class Args:
    env: str = "countdown"
    """environment, a key of ENVIRONMENTS"""
    model_name_or_path: str | None = None
    """instruct model to fine-tune, computing in bfloat16, on a CPU; None makes a tiny model"""
    output_dir: str | None = None
    """folder of the model; default envs/tiny_lm/<env>"""
    seed: int = 1
    """seed of demonstrations, weights and order"""
    steps: int = 4000
    """optimizer steps"""
    batch_size: int = 64
    """demonstrations a step"""
    learning_rate: float = 1.5e-3
    """peak of the cosine schedule, after a warm-up of 100 steps or, if that is less, a tenth"""
    vocab_size: int = 512
    """tokens: 256 bytes, special tokens and tags, the rest byte-pair merges"""
    hidden_size: int = 128
    """model width"""
    num_layers: int = 4
    """transformer blocks"""
    compile: bool = True
    """compile the model body (needs a C++ compiler; twice as fast, 45 s to start)"""


# --- Tokenizer and model ------------------------------------------------------------------------


def build_tokenizer(args: Args) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be encoded, digits are single, and phrases that every prompt
    repeats are one token."""
    environment = ENVIRONMENTS[args.env]
    generator = random.Random(f"tokenizer {args.seed}")
    corpus = []
    for _ in range(2000):
        messages, completion = environment.demonstration(generator)
        corpus += [messages[-1]["content"], completion]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(environment.isolated), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tags = [AddedToken(tag, special=False, normalized=False) for tag in environment.added_tokens]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(tags)
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size - len(tags),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens(tags)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(args: Args, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A small model with random weights."""
    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / 8) * 8,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 32,
        num_key_value_heads=args.hidden_size // 64,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


# --- Training -----------------------------------------------------------------------------------


def draw_rows(
    args: Args, tokenizer, generator: random.Random, count: int
) -> list[tuple[list[int], list[int]]]:
    """Demonstrations as (prompt ids, completion ids with the end token), sorted by length."""
    rows = []
    for _ in range(count):
        messages, completion = ENVIRONMENTS[args.env].demonstration(generator)
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        completion = tokenizer(completion, add_special_tokens=False)["input_ids"]
        rows.append((prompt, completion + [tokenizer.eos_token_id]))
    return sorted(rows, key=lambda row: len(row[0]) + len(row[1]))


def make_batch(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids (B,S) and labels (B,S), which are -100 where nothing is learned: prompt and
    padding."""
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return ids, labels


def train(args: Args) -> None:
    if args.env not in ENVIRONMENTS:
        sys.exit(f"--env {args.env}: unknown, expected one of {', '.join(ENVIRONMENTS)}")
    public = args.model_name_or_path
    if public:
        tokenizer = transformers.AutoTokenizer.from_pretrained(public)
        model = transformers.AutoModelForCausalLM.from_pretrained(public, dtype=torch.float32)
    else:
        tokenizer = build_tokenizer(args)
        model = build_model(args, tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=0.1, fused=True
    )
    body = torch.compile(model.model, dynamic=True) if args.compile else model.model
    generator = random.Random(f"demonstrations {args.seed}")
    start = time.perf_counter()
    pool = []
    for step in range(args.steps):
        if not pool:  # 32 batches at a time, sorted by length, so that little is padded
            rows = draw_rows(args, tokenizer, generator, count=32 * args.batch_size)
            pool = [rows[i : i + args.batch_size] for i in range(0, len(rows), args.batch_size)]
            generator.shuffle(pool)
        ids, labels = make_batch(pool.pop())
        warm_up = min(1.0, (step + 1) / min(100, args.steps / 10))
        cosine = 0.5 * (1 + math.cos(math.pi * step / args.steps))
        optimizer.param_groups[0]["lr"] = args.learning_rate * warm_up * (0.05 + 0.95 * cosine)
        targets = labels[:, 1:]  # (B,S-1)
        learned = targets != -100
        with torch.autocast("cpu", torch.bfloat16, enabled=public is not None):
            hidden = body(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # (B,S-1,H)
            logits = model.lm_head(hidden[learned]).float()  # (tokens,V)
        loss = torch.nn.functional.cross_entropy(logits, targets[learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        minutes = (time.perf_counter() - start) / 60
        if (step + 1) % max(1, min(100, args.steps // 10)) == 0:
            print(f"step {step + 1}/{args.steps}  loss {loss:.4f}  {minutes:.1f} min", flush=True)
    output_dir = args.output_dir or str(Path(__file__).parent / args.env)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    drawn = args.steps * args.batch_size
    print(f"{output_dir}: {parameters:,} parameters, {drawn:,} demonstrations")
    threads = torch.get_num_threads()
    print(f"{minutes:.1f} minutes, seed {args.seed}, {versions}, {threads} threads")


if __name__ == "__main__":
    train(tyro.cli(Args))
