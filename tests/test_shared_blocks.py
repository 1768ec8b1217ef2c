"""Scripts of a family are copies in which the method differs: these blocks are the same text in all that have them.

`python tests/sync_shared_blocks.py grpo` carries a change of grpo.py to the others.
"""

import pytest
from sync_shared_blocks import texts

SHARED = """
group_advantages kl_estimate policy_loss token_weights
gather JsonLines epoch_order load_reward load_task model_path load_model encode drop_long_prompts
refuse_unsupported longest_text attention_masks Hidden ReturnHidden add_methods recompute_layers check_model
sample_tokens random_seed token_logprobs micro_batches shard copy_model refresh
checkpoints save_checkpoint load_checkpoint save_final open_run log report parse_args
"""
ONE_TURN = "load_problems logprob_gaps Completion read_prompts generate complete Packed pack log_completions"
SEVERAL_TURNS = "Memory read generate"
EPISODES = "load_env logprob_gaps Completion reply_ids Packed pack"  # a row is a conversation of several turns
TEAM = """
group_advantages JsonLines epoch_order load_problems load_task encode drop_long_prompts Completion complete
micro_batches save_checkpoint load_checkpoint save_final log_completions
"""  # not in dr_mas.py, or with a text of its own there
THREE_MODELS = """
group_advantages JsonLines epoch_order load_reward load_task token_logprobs micro_batches shard refresh
report
"""  # not in pi_play.py, or with a text of its own there
GAMES = """
group_advantages JsonLines epoch_order load_problems load_reward load_task model_path drop_long_prompts Completion
complete micro_batches save_checkpoint log_completions report
"""  # not in spiral_rae.py, or with a text of its own there
BOTH_TERMS = "token_weights load_problems logprob_gaps token_logprobs micro_batches"  # not in hpt.py, or with a text of its own
ENGINE = """
policy_loss generate complete Packed refresh save_checkpoint load_checkpoint save_final
"""  # with --vllm and --lora-rank in grpo.py, dapo.py and gdpo.py, without in the other scripts
WITH_ENGINE = "sampling_correction VllmSampler repack_head add_adapters whole_weights sampling_metrics"
CONTROL = "setup random_seed checkpoints save_checkpoint load_checkpoint open_run log parse_args"
OFF_POLICY = "linear_schedule ReplayBuffer update_target"


def without_engine(names: str) -> list[str]:
    """The names that do not depend on --vllm and --lora-rank."""
    return [name for name in names.split() if name not in ENGINE.split()]


FAMILIES = [
    (["grpo", "dapo", "gdpo"], f"{SHARED} {ONE_TURN} {WITH_ENGINE}".split()),
    (["grpo", "dapo", "gdpo", "igpo", "empg"], without_engine(SHARED)),
    (["igpo", "pi_play", "empg"], SEVERAL_TURNS.split()),
    (["igpo", "empg", "hpt"], ["policy_loss", "refresh", "save_final", "save_checkpoint", "load_checkpoint"]),
    (["igpo", "spiral_rae", "pi_play"], ["policy_loss", "save_final", "load_checkpoint"]),
    (["igpo", "dr_mas", "spiral_rae"], ["policy_loss", "refresh"]),
    (["hpt", "spiral_rae", "dr_mas"], ["generate", "Packed"]),
    (["igpo", "pi_play"], EPISODES.split()),
    (["igpo", "empg"], ["load_problems", "setup", "update", "evaluate", *EPISODES.split()]),
    (["grpo", "dapo"], ["evaluate"]),
    (["grpo", "gdpo"], ["update"]),
    (["grpo", "dr_mas"], [name for name in without_engine(f"{SHARED} {ONE_TURN}") if name not in TEAM.split()]),
    (["grpo", "hpt"], [name for name in without_engine(f"{SHARED} {ONE_TURN} evaluate") if name not in BOTH_TERMS.split()]),
    (["grpo", "pi_play"], [name for name in without_engine(SHARED) if name not in THREE_MODELS.split()]),
    (["grpo", "spiral_rae"], [name for name in without_engine(f"{SHARED} {ONE_TURN}") if name not in GAMES.split()]),
    (["unimodal_poisson", "fm3q", "arac"], CONTROL.split()),
    (["fm3q", "arac"], OFF_POLICY.split()),
    (["grpo", "unimodal_poisson"], ["log"]),
]


@pytest.mark.parametrize("scripts, names", FAMILIES, ids=lambda value: value[0])
def test_shared_blocks_are_the_same_text(scripts, names):
    blocks = [texts(script) for script in scripts]
    for name in names:
        found = [block[name] for block in blocks if name in block]
        assert len(found) > 1, f"{name} is not in two of {scripts}"
        assert len(set(found)) == 1, (
            f"{name} differs: run tests/sync_shared_blocks.py on the right one of {scripts}"
        )
