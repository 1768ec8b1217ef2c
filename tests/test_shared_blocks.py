"""Scripts of a family are copies in which the method differs: these blocks are the same text in all that have them.

`python tests/sync_shared_blocks.py grpo` carries a change of grpo.py to the others.
"""

import pytest
from sync_shared_blocks import texts

SHARED = """
group_advantages kl_estimate policy_loss token_weights
gather JsonLines epoch_order load_problems load_reward load_task model_path load_model encode drop_long_prompts
refuse_unsupported longest_text attention_masks Hidden ReturnHidden add_methods recompute_layers logprob_gaps check_model
Completion sample_tokens generate complete problem_seed
Packed pack token_logprobs micro_batches shard copy_model refresh
checkpoints save_checkpoint load_checkpoint save_final open_run log log_completions report evaluate parse_args
"""
OLDER = """
kl_estimate policy_loss pool_statistics fail or_fail setup rank_and_world_size gather load_pretrained load_tokenizer
shard encode Samples Progress completion_logprobs Trained checkpoints save_checkpoint load_checkpoint Logger
"""
CONTROL = """
fail or_fail setup linear_schedule Progress checkpoints save_checkpoint load_checkpoint run_args Logger ReplayBuffer
update_target
"""
FAMILIES = [
    (["grpo", "dapo"], SHARED.split()),
    (["gdpo", "dr_mas", "igpo", "spiral_rae", "pi_play"], OLDER.split()),
    (["unimodal_poisson", "fm3q", "arac"], CONTROL.split()),
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
