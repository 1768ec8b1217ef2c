"""The program that measures how cost grows: its formula for memory against counted tensors, its points and its CSV."""

import ast
import importlib
import multiprocessing
import shlex
import weakref
from pathlib import Path

import pytest
import torch
import transformers
import tyro
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from algorithms import arac, dr_mas, fm3q, grpo, unimodal_poisson
from benchmarks import scaling, speed_marl, tables_scaling
from benchmarks.scaling import LARGE_MODELS, MODELS, Model, memory, parameters

SCRIPTS = {"grpo.py": grpo, "dr_mas.py": dr_mas, "fm3q.py": fm3q, "arac.py": arac}
SCRIPTS["unimodal_poisson.py"] = unimodal_poisson
SMALL = Model(2, 128, 256, 2, 1, 64, vocab=1000)
UNTIED = Model(2, 128, 384, 4, 2, 32, vocab=1001, tied=False, kind="qwen2")  # biases, a vocabulary that 2 do not divide
PROMPTS, GROUP, PROMPT, LENGTH = 4, 4, 12, 12


class Live(TorchDispatchMode):
    """Bytes of all tensors that are there, and the most that there were."""

    def __init__(self, tensors):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return

        def gone(_):
            self.seen.pop(key, None)
            self.now -= size

        self.seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result


def network(model: Model, device: str = "cpu"):
    """A random model of that shape."""
    names = {"hidden_size": model.hidden, "intermediate_size": model.intermediate, "vocab_size": model.vocab}
    names |= {"num_hidden_layers": model.layers, "num_attention_heads": model.heads}
    names |= {"num_key_value_heads": model.kv_heads, "tie_word_embeddings": model.tied}
    names |= {"head_dim": model.head_dim} if model.kind == "qwen3" else {}
    kind = transformers.Qwen3Config if model.kind == "qwen3" else transformers.Qwen2Config
    with torch.device(device):
        found = transformers.AutoModelForCausalLM.from_config(kind(**names, bos_token_id=None, eos_token_id=None))
    found.generation_config.eos_token_id = [model.vocab]  # never written
    return found.eval()


def step(model, args, optimizer, caches: list):
    """A rollout and an update as in `train`; the bytes of the rollout's largest cache go to `caches`."""
    forward = model.forward

    def watched(*positional, **named):
        result = forward(*positional, **named)
        caches[:] = [sum(x.keys.nbytes + x.values.nbytes for x in result.past_key_values.layers)]
        return result

    model.forward = watched
    prompts = [[3 + i] * PROMPT for i in range(PROMPTS)]
    generators = [torch.Generator().manual_seed(i) for i in range(PROMPTS)]
    samples = grpo.generate(model, prompts, GROUP, args, generators)
    model.forward = forward
    rows = [prompt for prompt in prompts for _ in range(GROUP)]
    rewards = torch.zeros(len(rows), 1)
    batch = grpo.Batch(rows, samples.completion_ids, samples.mask, samples.logprobs, rewards)
    yield
    grpo.update(model, optimizer, batch, torch.linspace(-1, 1, len(rows)), args)
    yield


def flags(**given) -> grpo.Args:
    return grpo.Args(
        max_completion_length=LENGTH,
        num_generations=GROUP,
        per_device_train_batch_size=8,
        reward_weights=(1.0,),
        **given,
    )


def held_tensors(model, optimizer):
    """Weights, gradients and moments, one after the other: a list of them would keep old gradients from being freed."""
    yield from model.parameters()
    yield from (x.grad for x in model.parameters() if x.grad is not None)
    yield from (x for state in optimizer.state.values() for x in state.values())


def held(model, optimizer) -> dict[str, int]:
    """Bytes of the tensors that stay, those of this process where they are sharded."""

    def own(tensor):
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes

    found = {"weights": sum(map(own, model.parameters()))}
    found["gradients"] = sum(own(x.grad) for x in model.parameters() if x.grad is not None)
    found["moments"] = sum(own(x) for state in optimizer.state.values() for x in state.values())
    return found


# --- Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_number_of_parameters(name):
    assert parameters(MODELS[name]) == sum(x.numel() for x in network(MODELS[name], "meta").parameters())


def test_sizes_are_those_of_the_models_that_people_use():
    """Hugging Face's model cards: 494,032,768, 1,543,714,304, 3,085,938,688 and 7,615,616,512 parameters."""
    assert [parameters(model) for model in LARGE_MODELS.values()] == [494032768, 1543714304, 3085938688, 7615616512]


@pytest.mark.parametrize("name", ["25M", "120M"])
def test_what_stays_is_counted_to_the_byte(name):
    """Weights, gradients and the state of the optimizer of one update."""
    model = network(MODELS[name], "meta").to_empty(device="cpu")  # drawing values takes longer than all the rest
    model.tie_weights()
    with torch.no_grad():
        torch._foreach_zero_(list(model.parameters()))  # what memory held before may be no number
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0, fused=True)
    grpo.apply_gradients(model, optimizer, flags())
    expected = memory(MODELS[name], bf16=False)
    assert held(model, optimizer) == {key: expected[key] for key in ("weights", "gradients", "moments")}


@pytest.mark.parametrize("model", [SMALL, UNTIED])
@pytest.mark.parametrize("bf16", [False, True])
def test_peak_of_a_step_on_one_process(model, bf16):
    """All tensors of a second step: the cache to the byte, the peaks within what the formula leaves out."""
    net, args, caches = network(model), flags(bf16=bf16, gradient_checkpointing=True), []
    net.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.0, fused=True)
    list(step(net, args, optimizer, caches))
    packed = 2 * (PROMPT - 1 + GROUP * LENGTH)  # 8 completions of 2 prompts
    sizes = {"rows": PROMPTS * GROUP, "tokens": PROMPT + LENGTH - 1, "packed_tokens": packed}
    expected = memory(model, bf16=bf16, **sizes)
    parts = step(net, args, optimizer, caches)
    for phase in ("rollout", "update"):
        live = Live(held_tensors(net, optimizer))
        with live:
            next(parts)
        ratio = live.peak / expected[phase]
        assert (0.98 if phase == "rollout" else 0.8) < ratio < 1, (phase, ratio)
        assert phase == "update" or caches == [expected["cache"]]
        del live


def on_two_processes(rank: int, folder: str, model: Model, bf16: bool, results) -> None:
    """Local bytes of a sharded model, and of its gathered copy after a rollout."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    net, args, caches = network(model), flags(bf16=bf16, fsdp=True, gradient_checkpointing=True), []
    grpo.shard(net, args)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.0, fused=True)
    parts = step(net, args, optimizer, caches)
    next(parts)
    copy = sum(parameter.nbytes for parameter in net.parameters())  # the gathered ones: not local, nothing is cut
    next(parts)
    results.put((rank, held(net, optimizer) | {"copy": copy, "cache": caches[0]}))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model, bf16", [(SMALL, True), (UNTIED, False)])
def test_shards_of_two_processes(model, bf16, tmp_path):
    context = multiprocessing.get_context("fork")  # torch is imported already
    results = context.SimpleQueue()
    given = (str(tmp_path), model, bf16, results)
    workers = [context.Process(target=on_two_processes, args=(rank, *given)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    found = dict(results.get() for _ in workers)
    expected = memory(model, 2, bf16=bf16, rows=PROMPTS * GROUP, tokens=PROMPT + LENGTH - 1)
    assert found[0] == {key: expected[key] for key in found[0]}
    assert found[0]["weights"] + found[1]["weights"] == 4 * parameters(model)


def test_the_page_has_the_computed_table():
    text = scaling.PAGE.read_text()
    assert scaling.page_with_memory(text) == text, "run python benchmarks/scaling.py --memory"
    assert scaling.memory_table() in text


def test_chunks_of_logits_are_those_of_the_scripts():
    assert scaling.LOGITS_PER_CHUNK == grpo.LOGITS_PER_CHUNK == dr_mas.LOGITS_PER_CHUNK


# --- Points and CSV ---------------------------------------------------------------------------------------------------

POINTS = scaling.cpu_points() + scaling.cuda_points()


@pytest.mark.parametrize("point", [p for p in POINTS if p.part != "limit"], ids=lambda p: f"{p.on}-{p.name}")
def test_flags_are_those_of_the_scripts(point):
    """The scripts take them, and they say what the axis says."""
    script, words = SCRIPTS[point.script], scaling.command(point, "MODEL")
    args = tyro.cli(script.Args, args=words[1:])
    script.check_args(args)
    value = {"prompts": "num_prompts_per_step", "group": "num_generations", "length": "max_completion_length"}
    if name := {**value, "num_envs": "num_envs"}.get(point.axis):
        assert getattr(args, name) == int(point.value)
    if point.part == "language":
        assert args.model_name_or_path == "MODEL" and args.max_steps == point.steps and not args.eval_steps
        assert not args.skip_equal_groups and args.bf16 == (point.on == "cuda")
    if point.axis == "size":
        assert point.model == point.value
    if point.script == "unimodal_poisson.py":
        assert args.num_envs * args.num_steps == 2048 and args.num_minibatches * args.update_epochs == 320


def test_commands_of_the_page_are_possible(monkeypatch):
    """Every script of the language family is there, with flags that it takes on eight processes."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    text = scaling.PAGE.read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("    torchrun --nproc_per_node 8")]
    names = [Path(words[3]).stem for words in commands]
    assert sorted(names) == ["dr_mas", "gdpo", "grpo", "igpo", "pi_play", "spiral_rae"]
    for name, words in zip(names, commands):
        script = importlib.import_module(f"algorithms.{name}")
        args = tyro.cli(script.Args, args=words[4:])
        script.check_args(args)
        assert args.bf16 and args.gradient_checkpointing and getattr(args, "fsdp", name == "pi_play")
        assert args.beta == 0  # no reference model, as in the table


def test_points_differ():
    assert len({scaling.key_of(vars(point)) for point in POINTS}) == len(POINTS)
    assert {(p.script, p.axis) for p in POINTS if p.part != "limit"} == set(tables_scaling.AXES)


def test_points_that_the_csv_has_are_skipped(tmp_path, monkeypatch):
    """And others are appended, each row with everything that says how it was made; a failure loses no other point."""

    def measure(point, models):
        if point.value == "1024":
            raise RuntimeError("out of memory")
        return {"flops_per_second": 2e9 * int(point.value)}

    monkeypatch.setattr(scaling, "measure", measure)
    path = tmp_path / "scaling.csv"
    args = scaling.Args(parts=("limit",), points=("*/size/[12]*",), csv=str(path))
    with pytest.raises(SystemExit, match="failed: torch.matmul/size/1024"):
        scaling.main(args)
    assert [point.value for point in scaling.due(args)] == ["1024"]
    assert [p.value for p in scaling.due(scaling.Args(parts=("limit",), csv=str(path)))] == ["512", "1024"]
    assert len(scaling.due(scaling.Args(device="cuda", csv=str(path)))) == len(scaling.cuda_points())
    monkeypatch.setattr(scaling, "measure", lambda point, models: {"flops_per_second": 5.0})
    scaling.main(args)
    scaling.main(args)  # nothing is left
    rows = scaling.read(path)
    assert [(row["value"], row["flops_per_second"]) for row in rows] == [("2048", "4096000000000"), ("1024", "5")]
    assert all(list(row) == scaling.COLUMNS for row in rows)
    check_row(rows[0])


def check_row(row: dict) -> None:
    """What every row must say."""
    names = [
        *scaling.KEY,
        "minutes",
        "threads",
        "load",
        "device",
        "torch",
        "transformers",
        "python",
        "commit",
        "command",
    ]
    assert all(row[name] for name in names) and "/tmp" not in row["command"]


def test_every_row_says_how_it_was_made():
    path = scaling.ROOT / scaling.Args.csv
    if not path.exists():
        pytest.skip("no results yet")
    rows, known = scaling.read(path), {scaling.key_of(vars(point)) for point in POINTS}
    assert len({scaling.key_of(row) for row in rows}) == len(rows)
    for row in rows:
        assert list(row) == scaling.COLUMNS and scaling.key_of(row) in known
        check_row(row)
        columns = {"language": ("step_seconds", "tokens"), "control": ("steps_per_second", "updates_per_second")}
        assert all(row[name] for name in columns.get(row["part"], ("flops_per_second",)))
        assert row["part"] == "limit" or float(row["peak_memory_gb"]) > 0.1


def test_metrics_of_a_run(tmp_path):
    """The first step of a language run and the first half of a control run do not count."""
    steps = ((9.0, 5.0, 10.0), (2.0, 0.5, 50.0), (4.0, 1.5, 25.0), (3.0, 1.0, 40.0))
    names = ("step_seconds", "rollout_seconds", "tokens_per_second")
    found = scaling.language_metrics({n: dict(zip(names, row)) for n, row in enumerate(steps, 1)}, 10)
    assert found["tokens"] == 100 and found["step_seconds"] == 3 and found["rollout_seconds"] == 1
    assert found["update_tokens_per_second"] == 50 and found["flops_per_second"] == 8 * 10 * 100 / 3
    text = "step,tag,value\n"
    for step, speed in ((100, 1.0), (200, 1000.0), (300, 50.0), (400, 100.0)):
        text += f"{step},charts/SPS,{speed}\n{step},perf/updates_per_second,{speed / 10}\n"
    (tmp_path / "perf.csv").write_text(text)
    found = scaling.control_metrics(scaling.perf_of(tmp_path))
    assert found == pytest.approx({"steps_per_second": 200 / 3, "updates_per_second": 20 / 3})


def test_a_script_is_stopped_behind_its_last_step(tmp_path, monkeypatch):
    """A script that would go on for an hour; one that fails is an error with what it said."""
    monkeypatch.setattr(scaling, "ROOT", tmp_path)
    (tmp_path / "run").mkdir()
    script = "import time, sys, pathlib\nrun = pathlib.Path(sys.argv[-1])\n"
    script += "(run / 'perf.csv').write_text('step,tag,value\\n1,perf/step_seconds,0.5\\n')\n"
    (tmp_path / "good.py").write_text(script + "print('step    1/2'); time.sleep(3600)\n")
    (tmp_path / "bad.py").write_text("sys_is_missing\n")
    assert scaling.run_script(["good.py"], tmp_path / "run", 1) == {1: {"step_seconds": 0.5}}
    with pytest.raises(RuntimeError, match="NameError"):
        scaling.run_script(["bad.py"], tmp_path / "run", 0)


def test_a_random_model_writes_to_the_end(tmp_path):
    """Every completion has exactly T tokens: the end token is outside the vocabulary."""
    scaling.make_model("0.8M", str(tmp_path))
    args = flags(model_name_or_path=str(tmp_path))
    tokenizer = grpo.load_tokenizer(args)
    model = grpo.load_model(args, tokenizer, torch.device("cpu"))
    assert parameters(MODELS["0.8M"]) == sum(x.numel() for x in model.parameters())
    assert min(model.generation_config.eos_token_id) >= model.config.vocab_size
    generators = [torch.Generator().manual_seed(1)]
    samples = grpo.generate(
        model, [grpo.encode(tokenizer, [{"role": "user", "content": "3"}])], GROUP, args, generators
    )
    assert samples.mask.all() and not samples.ended.any()
    assert len(tokenizer.batch_decode(samples.completion_ids.tolist(), skip_special_tokens=True)) == GROUP


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_goals_are_those_of_the_programs():
    """speed_grpo.py cannot be imported without TRL."""
    source = ast.parse((scaling.ROOT / "benchmarks/speed_grpo.py").read_text())
    (goals,) = [x.value for x in source.body if isinstance(x, ast.Assign) and x.targets[0].id == "GOALS"]
    assert ast.literal_eval(goals) == tables_scaling.GRPO_GOALS
    assert tables_scaling.MARL_GOAL == speed_marl.GOAL
    assert tables_scaling.MARL_OWN == {mixer: str(rates[0][0]) for mixer, rates in speed_marl.RATES.items()}


def test_tables_and_figure_from_rows(tmp_path):
    """Rows of every point give tables and a picture; no row gives none."""
    rows = []
    for point in scaling.cpu_points():
        row = dict.fromkeys(scaling.COLUMNS, "1") | {name: str(getattr(point, name)) for name in scaling.KEY}
        rows.append(row | {"parameters": str(parameters(MODELS[point.model or "5M"])), "flops_per_second": "2e9"})
    for name, function in tables_scaling.TABLES.items():
        assert name.startswith("limit") or function(lambda name: rows)
    assert tables_scaling.scaling_language(lambda name: rows).count("\n") == 1 + sum(
        point.part == "language" for point in scaling.cpu_points()
    )
    tables_scaling.draw_scaling(lambda name: [row for row in rows if row["script"] == "arac.py"], tmp_path)
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert not any(function(lambda name: []) for function in tables_scaling.TABLES.values())
