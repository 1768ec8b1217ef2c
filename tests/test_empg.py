"""EMPG's advantages of turns: worked numbers of the authors' formulas, Proposition 1, and properties."""

import json
from pathlib import Path

import pytest
import torch

from algorithms import empg
from algorithms.empg import modulate_advantages, policy_loss

REFERENCE = json.loads((Path(__file__).parent / "reference" / "empg.json").read_text())
def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.quick
@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: case["name"])
def test_reference_advantages(case):
    """The formulas of the project page and of equations 7 to 12, computed step by step."""
    found = modulate_advantages(
        double(case["trajectory_advantage"]),
        double(case["step_entropy"]),
        torch.tensor(case["step_trajectory"]),
        k=case["params"]["k"],
        k_future=case["params"]["k_f"],
        zeta=case["params"]["zeta"],
    )
    torch.testing.assert_close(found, double(case["out"]["A_final"]), rtol=0, atol=1e-12)


@pytest.mark.quick
@pytest.mark.parametrize("item", REFERENCE["proposition1"]["items"], ids=lambda item: f"{item['renyi2']:.2f}")
def test_reference_proposition_1(item):
    """The expected squared gradient of the loss by the logits is 1 - exp(-Renyi-2 entropy): sure turns move little."""
    expected = 0.0
    probs = double(item["logits"]).softmax(0)
    for action, prob in enumerate(probs):
        logits = double(item["logits"]).requires_grad_()
        logprob = logits.log_softmax(0)[action]
        policy_loss(logprob, logprob.detach(), double(1.0))[0].backward()
        expected += prob * logits.grad.square().sum()
    assert expected.item() == pytest.approx(item["expected_sq_score_norm"], abs=1e-12)
    assert expected.item() == pytest.approx(1 - probs.square().sum().item(), abs=1e-12)


def test_entropies_of_turns_are_those_of_the_plain_forward_pass():
    """Both ways: as generate keeps them while it samples, and as the policy computes them beside vLLM."""
    args = empg.Args(max_completion_length=24, temperature=1.3, micro_batch_size=5)
    task, _ = empg.load_task(args)
    model, tokenizer = empg.load_model(args)
    episodes = empg.play(model, tokenizer, task, [task.train_problem(i, 3) for i in range(3)], 4, args, range(3))
    sampled = [list(episode.entropies) for episode in episodes]
    empg.measure_entropies(model, episodes, args)
    for episode, kept in zip(episodes, sampled):
        with torch.no_grad():
            logits = model(torch.tensor([episode.prompt + episode.ids])).logits[0, len(episode.prompt) - 1 : -1]
        entropy = torch.distributions.Categorical(logits=logits / 1.3).entropy()
        turns = torch.tensor(episode.turns)
        expected = [entropy[turns == turn].mean().item() for turn in range(len(kept))]
        assert kept == pytest.approx(expected, rel=1e-4)
        assert episode.entropies == pytest.approx(expected, rel=1e-4)
