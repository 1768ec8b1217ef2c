"""Meta-DT: numbers of the authors' code (NJU-RL/Meta-DT @d568100), exact reductions, data of one's own."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import DecisionTransformerConfig, DecisionTransformerModel

from algorithms import meta_dt
from algorithms.meta_dt import (
    Args,
    ContextEncoder,
    MetaDecisionTransformer,
    RewardDecoder,
    StateDecoder,
)
from envs.point_robot import PointRobot, make_data, save_data

CASES = json.loads((Path(__file__).parent / "reference" / "meta_dt.json").read_text())
SMALL = {"embed_dim": 8, "num_layers": 1, "batch_size": 8, "context_dim": 4, "seed": 3}


def cases(start: str):
    """Parametrise a test by the reference cases whose name begins like this, each with what earlier cases hold."""
    found, known = [], {}
    for case in CASES:
        known = known | case
        if case["case"].startswith(start):
            found.append(known)
    assert found
    return pytest.mark.parametrize("case", found, ids=[case["case"] for case in found])


def tensors(values: dict) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def loaded(kind, state: dict):
    """A network of the world model with the authors' weights."""
    state = tensors(state)
    context_dim, state_dim = state["state_encoder.0.weight"].shape
    hidden = state["linear1.bias" if "linear1.bias" in state else "gru.weight_hh_l0"].shape
    network = kind(state_dim, state["action_encoder.0.weight"].shape[1], context_dim, hidden[-1])
    network.load_state_dict(state)
    return network


def assert_close(found, expected, absolute=2e-6) -> None:
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=absolute)


def world_model(case):
    """Contexts, prediction of the reward and of the next state, on the trajectory of the case."""
    steps = tensors(case["trajectory"])
    states, actions, following = (steps[name][None] for name in ("observations", "actions", "next_observations"))
    encoder = loaded(ContextEncoder, case["encoder"])
    contexts = encoder.every_step(states, actions, steps["rewards"][None], case["horizon"])
    rewards = loaded(RewardDecoder, case["reward_decoder"])(states, actions, following, contexts)
    return contexts[0], rewards[0], loaded(StateDecoder, case["state_decoder"])(states, actions, contexts)[0]


@cases("context_and_errors")
def test_reference_contexts_and_errors(case):
    contexts, rewards, states = world_model(case)
    assert_close(contexts, case["contexts"])
    steps = tensors(case["trajectory"])
    assert_close((rewards - steps["rewards"][:, None]).abs(), case["reward_errors"])
    mean, std = torch.tensor(case["state_mean"]), torch.tensor(case["state_std"])
    standardised = (steps["next_observations"] - mean) / std
    assert_close((states - standardised).abs(), case["state_errors_with_standardised_target"])


@cases("world_model_loss")
def test_reference_world_model_loss(case):
    _, rewards, states = world_model(case)
    steps = tensors(case["trajectory"])
    assert_close(F.mse_loss(rewards[:, 0], steps["rewards"]), case["reward_mse"])
    assert_close(F.mse_loss(states, steps["next_observations"]), case["state_mse"])


@cases("prompt_start_distribution")
def test_reference_prompt_starts(case):
    given = case["context_horizon"], case["prompt_length"], case["max_ep_len"]
    errors = torch.tensor(case["errors"])
    found = meta_dt.prompt_start_probabilities(errors, *given)
    assert_close(found, case["train_probs"])
    assert_close(meta_dt.prompt_start_probabilities(errors, *given, to_end=True), case["eval_probs"])
    assert case["starts"] == [given[0] + i for i in range(len(found))]
    assert given[0] + found.argmax() == case["paper_argmax_start"]
    # the same where episodes of several lengths are padded
    padded = torch.stack([F.pad(errors, (0, 0, 0, 3), value=9.0), F.pad(errors[:-1], (0, 0, 0, 4), value=9.0)])
    lengths = torch.tensor([len(errors), len(errors) - 1])
    several = meta_dt.prompt_start_probabilities(padded, *given[:2], lengths)
    assert_close(several[0, : len(found)], case["train_probs"])
    assert (several[0, len(found) :] == 0).all() and (several[1, len(found) - 1 :] == 0).all()
    assert_close(several.sum(-1), torch.ones(2))
    several = meta_dt.prompt_start_probabilities(padded, *given[:2], lengths, to_end=True)
    assert_close(several[0, : len(found)], case["eval_probs"])


@cases("transformer_forward")
def test_reference_transformer(case):
    """Outputs at masked positions are meaningless."""
    state = {name: torch.tensor(value) for name, value in case["state_dict"].items()}
    context_dim, state_dim = state["state_encoder.weight"].shape
    max_ep_len, hidden = state["embed_timestep.weight"].shape
    policy = MetaDecisionTransformer(
        state_dim, state["embed_action.weight"].shape[1], context_dim, hidden, max_ep_len,
        n_layer=sum(name.endswith("ln_1.weight") for name in state), n_head=case.get("n_head", 1),
        n_inner=state["transformer.h.0.mlp.c_fc.bias"].shape[0],
    ).eval()  # fmt: skip
    policy.load_state_dict(state)
    inputs = [torch.tensor(case[name]) for name in ("states", "contexts", "actions", "rtg", "timesteps", "mask")]
    mask = inputs[-1].bool()
    without = policy(*inputs)
    assert_close(without[mask], torch.tensor(case["action_pred_no_prompt"])[mask])
    prompt = tensors(case["prompt"])
    assert_close(policy(*inputs, prompt=prompt)[mask], torch.tensor(case["action_pred_prompt"])[mask])
    # a prompt that is masked is none
    hidden_prompt = prompt | {"mask": torch.zeros_like(prompt["timesteps"])}
    assert_close(policy(*inputs, prompt=hidden_prompt)[mask], without.detach()[mask], 1e-6)


@pytest.mark.quick
def test_point_robot_by_hand():
    """The best returns of two goals, and episodes that reach them."""
    envs = PointRobot(np.array([[1, 1], [0.5, 0]]))
    best = envs.best_returns()
    assert best == pytest.approx([-sum(2**0.5 * (1 - 0.1 * t) for t in range(1, 11)), -1.0])
    position, total = envs.reset(0), 0
    for _ in range(20):
        position, rewards, _ = envs.step(envs.goals - position)
        total = total + rewards
    assert total == pytest.approx(best)


def policy_and_inputs(dtype=torch.float64):
    torch.manual_seed(0)
    policy = MetaDecisionTransformer(3, 2, 4, 8, 9, n_layer=2).to(dtype).eval()
    steps = torch.randn(5, 6, 3, dtype=dtype), torch.randn(5, 6, 2, dtype=dtype), torch.randn(5, 6, 1, dtype=dtype)
    return policy, steps, torch.arange(6).expand(5, 6)


def test_zero_context_is_the_decision_transformer_of_transformers():
    """Of Hugging Face, with our weights and without position embeddings."""
    policy, (states, actions, rtg), timesteps = policy_and_inputs()
    config = DecisionTransformerConfig(
        state_dim=3, act_dim=2, hidden_size=8, max_ep_len=9, n_layer=2, n_head=1, activation_function="relu", n_inner=32
    )
    plain = DecisionTransformerModel(config).double().eval()
    weights = policy.state_dict()
    whole = weights.pop("embed_state.weight")[:, :4]  # two linear maps in one
    weights["embed_state.bias"] = weights["embed_state.bias"] + whole @ weights.pop("state_encoder.bias")
    weights["embed_state.weight"] = whole @ weights.pop("state_encoder.weight")
    ours = {name.replace("transformer.", "encoder."): value for name, value in weights.items() if "prompt" not in name}
    ours["encoder.wpe.weight"] = torch.zeros(1024, 8, dtype=torch.float64)
    ours = {name: value for name, value in ours.items() if name in plain.state_dict()}
    missing = set(plain.state_dict()) - set(ours)
    assert missing == set(), missing
    plain.load_state_dict(ours)
    found = policy(states, torch.zeros(5, 6, 4, dtype=torch.float64), actions, rtg, timesteps)
    given = {"states": states, "actions": actions, "returns_to_go": rtg, "rewards": rtg, "timesteps": timesteps}
    expected = plain(**given, attention_mask=torch.ones_like(timesteps)).action_preds
    assert_close(found, expected, 1e-12)


def test_loss_leaves_out_what_is_masked():
    predicted, actions = torch.randn(2, 3, 2), torch.randn(2, 3, 2)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    kept = torch.stack([predicted[0, 0] - actions[0, 0], predicted[0, 1] - actions[0, 1], predicted[1, 0] - actions[1, 0]])
    assert_close(meta_dt.policy_loss(predicted, actions, mask), kept.square().mean())


# --- Data and rollouts --------------------------------------------------------------------------


def small_data(**values):
    args = Args(**SMALL | values)
    data = meta_dt.load_data(args, torch.device("cpu"))
    torch.manual_seed(0)
    return args, data, meta_dt.Agent(data, args).eval()


@pytest.fixture
def folder(tmp_path):
    """Data of Point-Robot: four tasks and two new ones."""
    save_data(make_data(1, 4, 2, 5), tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("context", ["running", "episode", "goal", "none"])
def test_an_episode_is_what_the_training_would_see(folder, context, with_prompt):
    """Contexts, returns-to-go and actions of a rollout are those of one pass over the whole episode."""
    args, data, agent = small_data(data=str(folder), context=context)
    envs = PointRobot(data.tasks.numpy())
    seen = torch.randn(6, args.context_dim) if context == "episode" else None
    agent.encode(data.train)
    prompt = meta_dt.make_prompt(data.train, torch.arange(6), args) if with_prompt else None
    played = meta_dt.play(agent, envs, data.tasks, data.targets, prompt, seen, data, args)
    assert played.lengths.tolist() == [20] * 6
    contexts = played.contexts
    if context == "none":
        contexts = torch.zeros_like(contexts)
    elif context != "running":
        given = seen if context == "episode" else agent.goal_contexts(data.tasks)
        contexts = given[:, None].expand(-1, 20, -1)
    timesteps = torch.arange(20).expand(6, 20)
    gained = played.rewards * agent.reward_scale
    wanted = data.targets[:, None] - (gained.cumsum(1) - gained)
    steps = played.states, contexts, played.actions, wanted[..., None] / agent.return_scale, timesteps
    assert_close(agent.policy(*steps, prompt=prompt), played.actions, 1e-5)
    achieved = gained.flip(1).cumsum(1).flip(1)  # what a prompt of this episode tells, as in the data
    assert_close(played.rtg[..., 0] * agent.return_scale, achieved, 1e-4)
    position, total = envs.reset(0), 0
    for t in range(20):  # the same actions again
        position, rewards, _ = envs.step((played.actions[:, t] * agent.action_scale).detach().numpy())
        total = total + rewards
    assert played.returns.tolist() == pytest.approx(total.tolist(), rel=1e-4)


def test_prompts_come_from_the_largest_error_of_another_episode(folder):
    args, data, agent = small_data(data=str(folder))
    agent.encode(data.train)
    rows = torch.arange(len(data.train.lengths))
    prompt = meta_dt.make_prompt(data.train, rows, args)
    for row in rows.tolist():
        sums = [data.train.errors[row, s : s + 5].sum().item() for s in range(4, 16)]
        assert prompt["timesteps"][row].tolist() == list(range(4 + np.argmax(sums), 9 + np.argmax(sums)))
    # the released code draws in proportion: only the first and the last start have an error here
    data.train.errors[0] = 0
    data.train.errors[0, [4, 19]] = torch.tensor([[1.0], [3.0]])
    rows = torch.zeros(2000, dtype=torch.long)
    starts = meta_dt.make_prompt(data.train, rows, meta_dt.replace(args, prompt="released"))["timesteps"][:, 0]
    assert set(starts.tolist()) == {4, 15} and 0.7 < (starts == 15).float().mean() < 0.8
    starts = meta_dt.make_prompt(data.train, rows, meta_dt.replace(args, prompt="random"))["timesteps"][:, 0]
    assert set(starts.tolist()) == set(range(4, 16))


def test_other_episodes_are_of_the_same_task_and_not_the_same(folder, monkeypatch):
    args, data, agent = small_data(data=str(folder), no_prompt_steps=0, batch_size=500)
    agent.encode(data.train)
    seen = []
    original = meta_dt.segments

    def spy(episodes, rows, *others):
        seen.append(rows)
        return original(episodes, rows, *others)

    monkeypatch.setattr(meta_dt, "segments", spy)
    optimizer = torch.optim.AdamW(agent.policy.parameters(), 0.0)
    prompts = []
    agent.policy.register_forward_pre_hook(lambda _, __, inputs: prompts.append(inputs["prompt"]), with_kwargs=True)
    meta_dt.update_policy(agent, optimizer, data, 0, args)
    rows, others = seen
    has_prompt = prompts[0]["mask"]
    assert torch.equal(has_prompt.any(1), has_prompt.all(1)) and 0.86 < has_prompt.float().mean() < 0.94
    assert (rows != others).all() and torch.equal(rows // 5, others // 5)
    assert {(row % 5, other % 5) for row, other in zip(rows.tolist(), others.tolist())} >= {(0, 1), (0, 4), (3, 2)}


def test_contexts_of_the_prompts_episode_are_trained_on(folder, monkeypatch):
    """The mean over the other episode, in all steps; zeros where the prompt is dropped, too."""
    args, data, agent = small_data(data=str(folder), context="episode", no_prompt_steps=0, batch_size=50)
    agent.encode(data.train)
    seen, inputs = [], []
    original = meta_dt.make_prompt
    monkeypatch.setattr(meta_dt, "make_prompt", lambda *given: seen.append(given[1]) or original(*given))
    agent.policy.register_forward_pre_hook(lambda _, __, given: inputs.append(given), with_kwargs=True)
    meta_dt.update_policy(agent, torch.optim.AdamW(agent.policy.parameters(), 0.0), data, 0, args)
    expected = data.train.contexts[seen[0]].mean(1) * inputs[0]["prompt"]["mask"][:, :1]
    assert_close(inputs[0]["contexts"], expected[:, None].expand(-1, 20, -1), 1e-6)


def test_world_model_is_trained_as_it_is_used(folder, monkeypatch):
    """Its contexts see the steps before the predicted one, as in encode, also at an episode's start."""
    args, data, agent = small_data(data=str(folder))
    data.train.states[:] += 1  # nothing is 0 at the start
    agent.encode(data.train)
    seen = []
    original = agent.prediction_errors
    monkeypatch.setattr(agent, "prediction_errors", lambda *given: seen.append(given[1:]) or original(*given))
    meta_dt.update_world_model(agent, torch.optim.Adam(agent.encoder.parameters(), 0.0), data.train, args)
    ((rows, now), contexts), = seen
    assert set(now.tolist()) >= {0, 1, 3, 19}
    assert_close(contexts, data.train.contexts[rows, now], 1e-6)


def test_phases_rates_and_clips(folder):
    """The first steps have no prompt, the rate rises, and gradients are cut at 0.25 and 1."""
    args, data, agent = small_data(data=str(folder), no_prompt_steps=3, warmup_steps=4, learning_rate=0.1)
    data.train.actions *= 100
    data.train.rewards *= 100
    agent.encode(data.train)
    optimizer = torch.optim.AdamW(agent.policy.parameters(), 1.0)
    prompts, rates = [], []
    agent.policy.register_forward_pre_hook(lambda _, __, given: prompts.append(given["prompt"]), with_kwargs=True)
    for step in range(6):
        losses = meta_dt.update_policy(agent, optimizer, data, step, args)
        rates.append(optimizer.param_groups[0]["lr"])
    assert [prompt is None for prompt in prompts] == [True] * 3 + [False] * 3
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    norm = torch.nn.utils.get_total_norm([x.grad for x in agent.policy.parameters() if x.grad is not None])
    assert losses["policy_grad_norm"] > 0.25 and norm == pytest.approx(0.25, rel=1e-4)
    parameters = [*agent.encoder.parameters(), *agent.decoder.parameters()]
    losses = meta_dt.update_world_model(agent, torch.optim.Adam(parameters, 0.0), data.train, args)
    norm = torch.nn.utils.get_total_norm([x.grad for x in parameters])
    assert losses["world_model_grad_norm"] > 1 and norm == pytest.approx(1, rel=1e-4)


def test_short_episodes(folder):
    """Of other lengths: what lies past their ends changes nothing."""
    for path in folder.glob("*/*.npz"):
        file = dict(np.load(path))
        file["dones"][6] = file["dones"][27] = True  # episodes of 7, 13, 8, 12 steps, ...
        np.savez(path, **file)
    args, data, agent = small_data(data=str(folder), no_prompt_steps=0, learning_rate=0.0)
    assert data.train.lengths[:5].tolist() == [7, 13, 8, 12, 20]
    agent.encode(data.train)
    for row, length in enumerate((7, 13, 8, 12, 20)):
        assert_close(data.train.mean_contexts[row], data.train.contexts[row, :length].mean(0), 1e-6)
    prompt = meta_dt.make_prompt(data.train, torch.tensor([0, 2]), args)  # too short for h: the last k steps
    assert prompt["mask"].all() and prompt["timesteps"].tolist() == [[2, 3, 4, 5, 6], [3, 4, 5, 6, 7]]
    data.train.lengths[0] = 3
    prompt = meta_dt.make_prompt(data.train, torch.tensor([0]), args)  # shorter than k: all of it
    assert prompt["mask"].tolist() == [[True] * 3 + [False] * 2] and prompt["timesteps"][0, 0] == 0
    data.train.lengths[0] = 7
    optimizer = torch.optim.AdamW(agent.policy.parameters(), 0.0)

    def losses():
        torch.manual_seed(0)
        found = meta_dt.update_policy(agent, optimizer, data, 0, args)
        return found | meta_dt.update_world_model(agent, torch.optim.Adam(agent.encoder.parameters(), 0.0), data.train, args)

    before = losses()
    past = ~data.train.mask
    for name in ("states", "actions", "rewards", "next_states", "rtg", "contexts", "errors"):
        getattr(data.train, name)[past] = 7.0
    after = losses()
    assert all(float(before[name]) == pytest.approx(float(after[name]), rel=1e-5) for name in before)


def without(name):
    return lambda file: file.pop(name)


def put(name, change):
    def apply(file):
        file[name] = change(file[name])

    return apply


MISTAKES = {
    "has no rewards": without("rewards"),
    "the numbers of observations are not all finite": put("observations", lambda x: np.where(x == x[3], np.nan, x)),
    "the shape of rewards is (100, 1), expected 1": put("rewards", lambda x: x[:, None]),
    "99 actions, but 100 observations": put("actions", lambda x: x[1:]),
    "its last step is not done": put("dones", lambda x: x & False),
    "one episode only": put("dones", lambda x: np.arange(len(x)) == len(x) - 1),
    "next_observations must be the next step's observations": put("next_observations", lambda x: x[::-1]),
    "the shape of actions is (100, 1), in": put("actions", lambda x: x[:, :1]),
    "the shape of task is (3,), in": put("task", lambda x: np.zeros(3)),
    "expected 1 dimensions; a single number has the shape (1,)": put("task", lambda x: np.array(0.5)),
}


@pytest.mark.quick
@pytest.mark.parametrize("sentence", MISTAKES)
def test_mistakes_in_data_get_one_sentence(sentence, folder):
    path = folder / "train" / "002.npz"
    file = dict(np.load(path))
    MISTAKES[sentence](file)
    np.savez(path, **file)
    with pytest.raises(SystemExit) as stop:
        small_data(data=str(folder))
    assert str(path) in stop.value.code and sentence in stop.value.code and "\n" not in stop.value.code


def test_a_new_task_needs_one_episode(folder):
    path = folder / "new" / "000.npz"
    file = dict(np.load(path))
    np.savez(path, **{name: values if name == "task" else values[:20] for name, values in file.items()})
    assert len(small_data(data=str(folder))[1].new.lengths) == 6
    data = small_data(data=str(folder), few_shot="recorded")[1]
    assert [len(set(rows)) for rows in data.best.T.tolist()] == [3, 3, 3, 3, 1, 3]


def test_other_arrays_of_a_file_are_not_read(folder):
    path = folder / "train" / "002.npz"
    np.savez(path, infos=np.array([{}]), **np.load(path))
    small_data(data=str(folder))


@pytest.mark.quick
def test_other_mistakes_in_data(folder):
    with pytest.raises(SystemExit, match="too few"):
        small_data(data=str(folder), horizon=16)
    small_data(data=str(folder), horizon=16, prompt="none")
    with pytest.raises(SystemExit, match="task has 2 numbers, above --context-dim 1"):
        small_data(data=str(folder), context="goal", context_dim=1)
    (folder / "new" / "000.npz").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match="cannot be read as arrays"):
        small_data(data=str(folder))
    with pytest.raises(SystemExit, match="holds no .npz file"):
        small_data(data=str(folder / "train"))


def test_prompts_of_evaluations(folder, monkeypatch):
    """From one of the three best episodes of the same task: the policy's own ones, or the recorded ones."""
    args, data, agent = small_data(data=str(folder), eval_episodes=2, eval_rounds=3, context="episode")
    seen, contexts, seeds = [], [], []
    original, play = meta_dt.make_prompt, meta_dt.play

    class Robots(PointRobot):
        def reset(self, seed):
            seeds.append(seed)
            return super().reset(seed)

    def spy_play(*given):
        contexts.append(given[5])
        return play(*given)

    monkeypatch.setattr(meta_dt, "play", spy_play)

    def spy(episodes, rows, args):
        seen.append((episodes, rows))
        return original(episodes, rows, args)

    monkeypatch.setattr(meta_dt, "make_prompt", spy)
    for few_shot in ("own", "recorded"):
        seen.clear(), contexts.clear(), seeds.clear()
        meta_dt.evaluate(agent, data, Robots, meta_dt.replace(args, few_shot=few_shot))
        assert len(seen) == 3
        assert len(set(seeds)) == 4, "each round starts elsewhere, where starts are random"
        assert contexts[0] is None
        for (pool, rows), given in zip(seen, contexts[1:]):
            assert torch.equal(given, pool.mean_contexts[rows])
        for turn, (pool, rows) in enumerate(seen):
            assert torch.equal(pool.tasks[rows], data.tasks.repeat(2, 1))
            for column, row in enumerate(rows.tolist()):
                others = (pool.tasks == pool.tasks[row]).all(1)
                if few_shot == "own":  # of the same learner
                    others &= torch.arange(len(pool.tasks)) % 12 == column
                    assert others.sum() == turn + 1
                assert pool.returns[row] >= pool.returns[others].topk(min(3, int(others.sum()))).values[-1]


def test_scores_by_hand(folder, monkeypatch):
    """Returns of the first and of the last round, of training tasks and new ones; errors in the reward's unit."""
    args, data, agent = small_data(data=str(folder), eval_episodes=2, eval_rounds=2)
    given = torch.tensor([[1.0, 2, 3, 4, 50, 60, 1, 2, 3, 4, 70, 80], [9] * 12, [3, 3, 3, 7, 0, 8, 3, 3, 3, 7, 8, 0]])
    rounds = iter(given)
    play = meta_dt.play
    monkeypatch.setattr(meta_dt, "play", lambda *a: meta_dt.replace(play(*a), returns=next(rounds)))
    found = meta_dt.evaluate(agent, data, PointRobot, args)
    best = PointRobot(data.tasks.numpy()).best_returns()
    for part, tasks, zero_shot, few_shot in (("train", slice(0, 4), 2.5, 4), ("new", slice(4, 6), 65, 4)):
        assert found[f"eval/{part}/zero_shot_return"] == zero_shot
        assert found[f"eval/{part}/few_shot_return"] == few_shot
        assert found[f"eval/{part}/target_return"] == pytest.approx(data.targets[tasks].mean().item())
        assert found[f"eval/{part}/optimal_return"] == pytest.approx(best[tasks].mean())
        episodes = getattr(data, part)
        steps = episodes.states, episodes.actions, episodes.rewards
        contexts = agent.encoder.every_step(*steps, args.horizon)
        predicted = agent.decoder(*steps[:2], episodes.next_states, contexts)[..., 0] * agent.reward_scale
        paths = sorted((folder / part).glob("*.npz"))
        rewards = torch.cat([torch.from_numpy(np.load(path)["rewards"]).view(-1, 20) for path in paths])
        assert found[f"eval/{part}/world_model_error"] == pytest.approx((predicted - rewards).abs().mean().item(), rel=1e-4)


def test_what_follows_the_end_of_an_episode_does_not_count(folder):
    """Robots end after 1, 2, ... 6 steps, say so once, and are paid on."""
    args, data, agent = small_data(data=str(folder))

    class Ends(PointRobot):
        def step(self, actions):
            self.time = getattr(self, "time", 0) + 1
            return super().step(actions)[0], np.ones(6), np.arange(1, 7) == self.time

    played = meta_dt.play(agent, Ends(data.tasks.numpy()), data.tasks, data.targets, None, None, data, args)
    assert played.lengths.tolist() == [1, 2, 3, 4, 5, 6]
    assert played.returns.tolist() == pytest.approx([1, 2, 3, 4, 5, 6])
    assert_close(played.rtg[3, :5, 0] * agent.return_scale, [4, 3, 2, 1, 0], 1e-5)
