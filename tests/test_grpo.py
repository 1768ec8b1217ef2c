"""GRPO: the numbers of other people's code, properties, and the fast path against the plain one."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from algorithms import grpo
from algorithms.grpo import Args, Completion, generate, group_advantages, sample_tokens, update

LOSS_TYPES = ["grpo", "dr_grpo", "dapo"]
VECTORS = json.loads((Path(__file__).parent / "reference" / "grpo.json").read_text())["vectors"]
BY_ID = {vector["id"]: vector for vector in VECTORS}


def assert_close(actual, expected, tolerance=2e-5):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), expected, rtol=tolerance, atol=tolerance)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- Reference: the output of other people's code ---------------------------------------------------------------------


def left_out(vector) -> bool:
    """What grpo.py has no argument for: NaN as a reward, the bare reward of a lone answer, bnpo, a bound on the ratio
    of negative advantages, other KL penalties than k3 or one with the ratio. The overlong penalty: test_dapo.py."""
    params = vector["params"]
    carries_ratio = params.get("beta") and params["use_bias_correction_kl"]
    other_kl = params.get("kl_penalty", "k3") not in ("k3", "low_var_kl")
    words = ("nan", "dual_clip", "soft_overlong", "adv/singleton/verl")
    other = any(word in vector["id"] for word in words) or params.get("loss_type") == "bnpo"
    return bool(other or other_kl or carries_ratio)


def vectors(kind: str):
    """Parametrise a test by the vectors of one kind that are used."""
    found = [v for v in VECTORS if v["id"].startswith(f"{kind}/") and not left_out(v)]
    return pytest.mark.parametrize("vector", found, ids=[vector["id"] for vector in found])


def test_reference_vectors_are_all_accounted_for():
    used = [vector["id"].split("/")[0] for vector in VECTORS if not left_out(vector)]
    assert len(VECTORS) == len(BY_ID) == 99
    assert {kind: used.count(kind) for kind in used} == {"adv": 35, "loss": 35, "kl": 2}


@vectors("adv")
def test_reference_advantages(vector):
    params, inputs, outputs = vector["params"], vector["inputs"], vector["outputs"]
    if "step_rewards" in inputs:  # all steps of a group's answers are one group, without epsilon
        groups = [sum(inputs["step_rewards"], [])]
        expected = sum(outputs["normalized_step_rewards"], [])
        params = {"eps_added_to_std": 1e-30}
    else:
        groups = inputs["rewards"]
        expected = outputs.get("advantages", outputs.get("advantages_per_sequence"))
    scale_rewards = params.get("scale_rewards", "group")
    if params.get("critic_type") == "drgrpo" or params.get("norm_adv_by_std_in_grpo") is False:
        scale_rewards = "none"
    options = {"std_epsilon": params.get("eps_added_to_std"), "ddof": params.get("ddof")}
    options = {name: value for name, value in options.items() if value is not None}
    advantages = group_advantages(torch.tensor(groups).flatten(), len(groups[0]), scale_rewards, **options)
    rounding = 1e-4 if "GRPO-Zero" in vector["source"] else 2e-5  # it has float64
    assert_close(advantages, torch.tensor(expected).flatten(), rounding)


VERL_MODES = {  # as loss_type, num_tokens, max_completion_length
    "token-mean": ("dapo", None, 1),
    "token-sum": ("dapo", 1, 1),
    "seq-mean-token-mean": ("grpo", None, 1),
    "seq-mean-token-sum": ("dr_grpo", None, 1),
    "seq-mean-token-sum-norm": ("dr_grpo", None, 8),
}


@vectors("loss")
def test_reference_loss_and_gradient(vector):
    params, outputs = vector["params"], vector["outputs"]
    inputs = BY_ID[vector["inputs"].get("same_as", vector["id"])]["inputs"]
    logprobs = torch.tensor(inputs["logps_new"], requires_grad=True)  # (B,T)
    on_policy = isinstance(inputs["logps_old"], str)
    old_logprobs = logprobs.detach() if on_policy else torch.tensor(inputs["logps_old"])
    advantages = torch.tensor(inputs["advantages"], dtype=torch.float32)  # (B,)
    counts = torch.tensor(inputs["completion_mask"]).bool()  # (B,T)
    lengths = counts.sum(1)

    if "loss_agg_mode" in params:  # verl leaves rows without a token out of the mean over rows
        assert outputs["actor/pg_clipfrac_lower"] == 0  # its second bound does not act
        loss_type, num_tokens, longest = VERL_MODES[params["loss_agg_mode"]]
        num_rows = int((lengths > 0).sum())
        options = {"epsilon": params["clip_ratio_low"], "epsilon_high": params["clip_ratio_high"]}
    elif "kl_weight" in params:  # tiny-grpo
        loss_type, num_tokens, longest, num_rows = "grpo", None, 1, len(counts)
        options = {"epsilon": params["clip_eps"], "beta": params["kl_weight"]}
    else:  # TRL
        loss_type, num_rows = params["loss_type"], len(counts)
        num_tokens = params.get("num_items_in_batch")
        longest = params["max_completion_length"]
        options = {key: params[key] for key in ("epsilon", "epsilon_high", "beta") if key in params}
    if options.get("beta"):
        options["ref_logprobs"] = torch.tensor(inputs["logps_ref"])[counts]
    weights = grpo.token_weights(
        lengths, loss_type, num_rows=num_rows, num_tokens=num_tokens or int(counts.sum()), max_completion_length=longest
    )
    rows = counts.nonzero()[:, 0]
    losses, clipped = grpo.policy_loss(logprobs[counts], old_logprobs[counts], advantages[rows], **options)
    loss = (losses * weights[rows]).sum()
    loss.backward()
    assert_close(loss, outputs["loss"])
    assert_close(logprobs.grad, outputs["grad_wrt_logps_new"])
    for name in ("clip_ratio_region_mean", "actor/pg_clipfrac"):
        if name in outputs:
            assert_close(clipped.float().mean(), outputs[name])
    if outputs.get("kl") is not None:
        mean = grpo.kl_estimate(logprobs[counts], options["ref_logprobs"]).mean()
        assert_close(mean, outputs["kl"])


@vectors("kl")
def test_reference_kl_estimate(vector):
    """verl clamps the value at 10; those below agree, with their gradients."""
    value = torch.tensor(vector["outputs"]["value"])
    below = value < 10
    assert below.sum() == 4
    logprobs = torch.tensor(vector["inputs"]["logprob"], requires_grad=True)
    estimate = grpo.kl_estimate(logprobs, torch.tensor(vector["inputs"]["ref_logprob"]))
    estimate[below].sum().backward()
    assert_close(estimate[below], value[below])
    gradient = torch.tensor(vector["outputs"]["grad_wrt_logprob"])
    assert_close(logprobs.grad[below], gradient[below])


# --- Properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_groups_get_exactly_zero(scale):
    """Also where the mean of equal numbers is not that number, as of seven times 0.1."""
    rewards = (torch.arange(1, 1000) / 1000).repeat_interleave(7)
    other = torch.arange(7.0)  # one group that is not equal
    advantages = group_advantages(torch.cat([rewards, other]), 7, scale)
    assert (advantages[:-7] == 0).all()
    assert (advantages[-7:] != 0).any()


# --- A tiny model -----------------------------------------------------------------------------------------------------

END = 5
PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [20], [21, 22, 23, 24, 25, 26]]
T = 24


def tiny_model(seed: int):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.15,
        attention_dropout=0.3,  # which nothing may switch on
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=END,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.lm_head.weight.data[END] *= 2.5  # its logit varies most: rows end at different times
    model.generation_config.eos_token_id = [END]
    grpo.add_methods(model)
    return model


@pytest.fixture(scope="module")
def model():
    return tiny_model(0)


def nearby_model():
    """Near the model, as the reference of a KL penalty is."""
    other = tiny_model(0)
    with torch.no_grad():
        for parameter, change in zip(other.parameters(), tiny_model(1).parameters()):
            parameter.add_(change, alpha=0.05)
    return other


@pytest.fixture(scope="module")
def other_model():
    return nearby_model()


@pytest.fixture
def compactions(monkeypatch) -> list[int]:
    """Rows that are kept whenever rows leave a cache."""
    kept = []
    original = grpo.Decoder.allocate

    def spy(decoder, places, width):
        if decoder.count > 1 and len(places) < len(decoder.cache.layers[0].keys):
            kept.append(len(places))
        return original(decoder, places, width)

    monkeypatch.setattr(grpo.Decoder, "allocate", spy)
    return kept


def plain_logprobs(model, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-distributions (T,V) of one completion: one row, without padding, packing or cache."""
    ids = torch.tensor([completion.prompt + completion.ids])
    logits = model(ids, use_cache=False).logits[0, len(completion.prompt) - 1 : -1]
    return (logits / temperature).log_softmax(1)


def plain_chosen(model, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities (T,) of its tokens."""
    logprobs = plain_logprobs(model, completion, temperature)
    return logprobs.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]


# --- Rollout ----------------------------------------------------------------------------------------------------------


def rows_of(prompts: list, num_generations: int) -> list:
    """Every prompt several times, as the rows of a batch."""
    return [prompt for prompt in prompts for _ in range(num_generations)]


def test_greedy_generation_equals_transformers(model, compactions):
    completions = generate(model, rows_of(PROMPTS, 3), Args(max_completion_length=T))
    assert compactions, "no row has left the cache"
    for row, completion in enumerate(completions):
        prompt = PROMPTS[row // 3]
        ids = torch.tensor([prompt])
        expected = model.generate(ids, do_sample=False, max_new_tokens=T, pad_token_id=0)
        assert completion.ids == expected[0, len(prompt) :].tolist()
        assert completion.prompt == prompt
        assert completion.ended == (completion.ids[-1] == END)
    assert len({len(completion.ids) for completion in completions}) > 1


def test_samples_follow_the_seeds(model, compactions):
    """A sample depends on its own seed alone, not on its neighbours or its place, or on rows that leave."""
    args = Args(max_completion_length=T)
    rows = rows_of(PROMPTS, 4)
    one = [c.ids for c in generate(model, rows, args, range(16))]
    two = [c.ids for c in generate(model, rows[::-1], args, [*range(15, 0, -1), 99])]
    alone = [c.ids for row in range(1, 16) for c in generate(model, rows[row : row + 1], args, [row])]
    assert one[1:] == two[::-1][1:] == alone
    assert one[0] != two[-1]
    assert len(set(map(tuple, one))) > 12 and compactions


def test_sample_tokens_has_exact_frequencies():
    probs = torch.tensor([0, 0.25, 0.05, 0, 0, 0.4, 0.1, 0.2, 0])
    count = 20_000
    uniform = (torch.arange(count) + 0.5) / count
    drawn = sample_tokens(probs.log().expand(count, -1), uniform)
    counts = torch.bincount(drawn, minlength=9)
    assert (counts - count * probs).abs().max() <= 1
    assert (counts[probs == 0] == 0).all()


@pytest.mark.parametrize("number", [0.0, 2.0**-24, 0.5, 1 - 2.0**-24])
def test_sample_tokens_at_the_ends_of_the_uniform(number):
    """Also for the smallest and largest uniform number no token without probability is drawn."""
    logits = torch.randn(2000, 300, generator=torch.Generator().manual_seed(5)) * 3
    logits[:, :5] = -math.inf
    logits[:, -5:] = -math.inf
    tokens = sample_tokens(logits.log_softmax(1), torch.full((2000,), number))
    assert (tokens >= 5).all() and (tokens < 295).all()


# --- Packing and update -----------------------------------------------------------------------------------------------

G = 4
BASE = Args(num_generations=G, max_completion_length=12, max_grad_norm=1e9, temperature=0.9)
ADVANTAGES = torch.tensor([1.0, -1, 0.5, 0] * 2 + [0] * 4 + [0.3, -2, 1, 1] + [0] * 4 + [1.0] * 4)


def some_batch(model) -> list[Completion]:
    """Six groups of four: prompts of 1 to 9 tokens, one of them twice in a row; 1 to 10 tokens."""
    generator = torch.Generator().manual_seed(6)
    completions = []
    for prompt in [*PROMPTS, PROMPTS[3], [30, 31]]:
        for _ in range(G):
            length = int(torch.randint(1, 11, (), generator=generator))
            ids = torch.randint(6, 64, (length,), generator=generator).tolist()
            completion = Completion(prompt, ids, [], ended=True)
            with torch.no_grad():
                completion.logprobs = plain_chosen(model, completion, 0.9).tolist()
            completions.append(completion)
    return completions


@pytest.fixture(scope="module")
def batch(model):
    return some_batch(model)


@pytest.mark.parametrize("prompt, length", [(20, 200), (77, 128), (200, 64), (1000, 100)])
def test_packed_rows_have_the_length_that_costs_least(prompt, length):
    """Attention takes the square of a row, all else its length. No even split of a group costs 3 % less."""

    def cost(sizes):
        lengths = [prompt - 1 + size * length for size in sizes]
        return sum(length**2 + grpo.ATTENTION_LENGTH * length for length in lengths)

    group = [Completion([1] * prompt, [1] * length, [0.0] * length, True) for _ in range(8)]
    args = replace(BASE, micro_batch_tokens=10**5)
    rows = [row for one_pass in grpo.divide(group, list(range(8)), args, torch.device("cpu")) for row in one_pass]
    assert sorted(number for row in rows for number in row) == list(range(8))
    assert cost(map(len, rows)) < 1.03 * min(cost([size] * (8 // size)) for size in (1, 2, 4, 8))


@pytest.mark.parametrize("attention", [3000, 0])  # whole groups, and parts
@pytest.mark.parametrize("tokens, micro_batch", [(None, None), (64, None), (None, 3), (40, 3), (1, 1)])
def test_packed_logprobs_equal_one_row_forwards(model, batch, monkeypatch, attention, tokens, micro_batch):
    monkeypatch.setattr(grpo, "ATTENTION_LENGTH", attention)
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", 64 * 7)  # 7 tokens at once
    args = replace(BASE, micro_batch_tokens=tokens, micro_batch_size=micro_batch)
    rows = [row for row in range(24) if row != 13]  # rows of a group may be left out
    seen = []
    for packed in grpo.micro_batches(batch, rows, args, model.device):
        here = list(dict.fromkeys(packed.completion_index.tolist()))
        assert len(here) <= (micro_batch or 24)
        assert packed.input_ids.numel() <= (tokens or 1024) or len(here) == 1
        with torch.no_grad():
            found = model.token_logprobs(packed, args)
            expected = torch.cat([plain_chosen(model, batch[row], 0.9) for row in here])
        assert_close(found, expected, 1e-5)
        recorded = [logprob for row in here for logprob in batch[row].logprobs]
        assert_close(packed.sampled_logprobs, recorded)
        num_packed, width = packed.input_ids.shape
        assert num_packed <= len(here), "a packed row without any completion"
        alone = max(len(batch[row].prompt) + len(batch[row].ids) - 1 for row in here)
        assert tokens != 1 or width == math.ceil(alone / 8) * 8
        seen += here
    assert sorted(seen) == rows, "a row was lost or taken twice"


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def written_out_loss(model, batch, args: Args, old_logprobs=None, reference=None, advantages=ADVANTAGES):
    """The loss of a batch row by row, as in the papers, and the log-probabilities of each row."""
    loss = 0.0
    all_logprobs = []
    for row, completion in enumerate(batch):
        logprobs = plain_chosen(model, completion, args.temperature)
        all_logprobs.append(logprobs.detach())
        old = logprobs.detach() if old_logprobs is None else old_logprobs[row]
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
        losses = -torch.min(ratio * advantages[row], clipped * advantages[row])
        if reference is not None:
            log_ratio = plain_chosen(reference, completion, args.temperature).detach() - logprobs
            losses = losses + args.beta * (log_ratio.exp() - log_ratio - 1)
        if args.loss_type == "grpo":
            loss = loss + losses.mean() / len(batch)
        elif args.loss_type == "dr_grpo":
            loss = loss + losses.sum() / len(batch) / args.max_completion_length
        else:
            loss = loss + losses.sum() / sum(len(other.ids) for other in batch)
    return loss, all_logprobs


def written_out_gradient(model, batch, args: Args, reference=None):
    """Gradient in float64, and the loss."""
    model = copy.deepcopy(model).double()
    reference = copy.deepcopy(reference).double() if reference else None
    loss, _ = written_out_loss(model, batch, args, reference=reference)
    loss.backward()
    return flat(parameter.grad for parameter in model.parameters()), loss.item()


class Recorder(torch.optim.SGD):
    """Keeps the last gradient and leaves the weights as they are."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.parameters = list(model.parameters())

    def step(self):
        self.gradient = flat(parameter.grad for parameter in self.parameters)


def updated_gradient(model, batch, args: Args, reference=None):
    """Gradient that `update` gives to the optimizer, and its metrics."""
    recorder = Recorder(model)
    metrics = update(model, reference, recorder, batch, ADVANTAGES, args)
    return recorder.gradient, metrics


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_equals_that_of_the_loss_written_out(model, other_model, batch, loss_type, beta):
    args = replace(BASE, loss_type=loss_type, beta=beta)
    reference = other_model if beta else None
    expected, loss = written_out_gradient(model, batch, args, reference)
    micro_batches = ({"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_tokens": 40}, {})
    for micro_batch in (*micro_batches, {"num_iterations": 2}):  # metrics are means of the iterations
        changed = replace(args, **micro_batch)
        gradient, metrics = updated_gradient(model, batch, changed, reference)
        assert relative(gradient, expected) < 1e-5, micro_batch
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)
        assert metrics["clip_ratio"] == 0
        assert metrics["sampling/logprob_difference/max"] < 1e-4
    assert ("kl" in metrics) == (beta > 0)


def test_gradient_is_scaled_down_to_max_grad_norm(model, batch):
    expected, whole = updated_gradient(model, batch, BASE)
    gradient, metrics = updated_gradient(model, batch, replace(BASE, max_grad_norm=1e-3))
    assert metrics["grad_norm"] == whole["grad_norm"] > 1e-3
    assert_close(gradient, expected * 1e-3 / whole["grad_norm"], 1e-7)
    unclipped, _ = updated_gradient(model, batch, replace(BASE, max_grad_norm=0))
    assert_close(unclipped, expected, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run(model, batch, value):
    learner = copy.deepcopy(model)
    before = flat(learner.parameters())
    optimizer = torch.optim.SGD(learner.parameters(), lr=1.0)
    with pytest.raises(SystemExit, match="gradient norm"):
        update(learner, None, optimizer, batch, ADVANTAGES * value, BASE)
    assert torch.equal(flat(learner.parameters()), before), "stepped before the check"
