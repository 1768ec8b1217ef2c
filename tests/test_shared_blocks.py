"""Scripts of a family are copies in which the method differs: these blocks are the same text in all that have them.

`python tests/sync_shared_blocks.py grpo` carries a change of grpo.py to the others.
"""

import pytest
from sync_shared_blocks import texts

SHARED = """
group_advantages kl_estimate policy_loss sampling_correction token_weights
check_flags gather read_file read_rows JsonLines epoch_order from_file load_task model_path load_model turn_end
encode check_tags answer_text drop_long_prompts score call_each event_loop
refuse_unsupported longest_text attention_masks Hidden ReturnHidden add_methods recompute_layers compile_layers check_model
Decoder Buffers recorded recording_stream over_temperature packed_length tokens_at_once divide warn_of_slow_bfloat16
sample_tokens VllmSampler repack_head random_seed token_logprobs micro_batches sampling_metrics
add_adapters adapters_off shard copy_model whole_weights refresh
checkpoints trained_state save_checkpoint load_checkpoint save_final checksums open_run log report parse_args
join_repeated one_sentence_for_a_full_disk is_due scheduled_rate log_answers open_board
"""
ONE_TURN = "load_problems logprob_gaps Completion read_prompts generate complete Packed pack log_completions"
AGENTS = "group_advantages JsonLines read_file read_rows epoch_order score"  # not in igpo.py, or with a text of its own there
TOOLS = "score ask load_problems"  # of agent tasks
JUDGED = "score ask load_problems cut_at_stop"
SEVERAL_TURNS = "Memory read generate"
ENTROPIES = "Decoder"  # keeps them in empg.py and arpo.py
EPISODES = "logprob_gaps Completion reply_ids StoppingDecoder Packed pack"  # a row is a conversation of several turns
TREES = "JsonLines read_file read_rows epoch_order score VllmSampler Completion Decoder"  # not in arpo.py, or with entropies there
TEAM = """
group_advantages JsonLines read_file read_rows epoch_order load_problems load_task encode drop_long_prompts Completion complete
save_checkpoint load_checkpoint log_completions
"""  # not in dr_mas.py, or with a text of its own there
THREE_MODELS = """
group_advantages JsonLines read_file read_rows epoch_order load_task token_logprobs micro_batches shard
trained_state report
"""  # not in pi_play.py, or with a text of its own there
GAMES = """
group_advantages JsonLines read_file read_rows epoch_order load_problems load_task model_path drop_long_prompts Completion
check_tags score call_each event_loop complete log_completions report
"""  # not in spiral_rae.py, or with a text of its own there
BOTH_TERMS = """
token_weights load_problems logprob_gaps token_logprobs
"""  # not in hpt.py, or with a text of its own
PREFERENCES = """
group_advantages token_weights load_task model_path report load_problems Completion complete Packed micro_batches log_completions
check_tags score
"""  # not in nash_preference.py, or with a text of its own there
DISTILLED = """
group_advantages kl_estimate policy_loss token_weights add_methods Decoder token_logprobs Packed log_completions
"""  # not in opd.py, or with a text of its own there
RARE = "evaluate update add_methods token_logprobs"  # with a text of its own in unlikeliness.py
SCORED = """
check_flags gather from_file load_model turn_end encode refuse_unsupported longest_text attention_masks Hidden ReturnHidden
add_methods recompute_layers compile_layers over_temperature tokens_at_once warn_of_slow_bfloat16 token_logprobs
add_adapters adapters_off copy_model whole_weights checkpoints trained_state save_checkpoint load_checkpoint save_final
checksums open_run log parse_args join_repeated one_sentence_for_a_full_disk is_due scheduled_rate log_answers open_board
"""  # what dipllm.py has in common with the others: it samples nothing, so the rest is not there
TEACHERS = "load_problems log_completions"  # problems are those that the shipped model cannot solve
CONTROL = "setup random_seed checkpoints save_checkpoint load_checkpoint open_run log is_due parse_args"
OFF_POLICY = "ReplayBuffer update_target"
PPO = """
make_envs load_function Unfinished scale_rewards gae report
"""
TASKS = "make_env check_envs action_ends as_actions check_finite is_due"


def without(others: str, names: str) -> list[str]:
    return [name for name in names.split() if name not in others.split()]


FAMILIES = [
    (["grpo", "dapo", "gdpo"], f"{SHARED} {ONE_TURN}".split()),
    (["grpo", "igpo"], without(AGENTS, SHARED)),
    (["grpo", "empg"], ["group_advantages"]),
    (["igpo", "empg"], without(f"{AGENTS} token_logprobs Completion {ENTROPIES}", f"{SHARED} setup update evaluate {EPISODES}") + TOOLS.split()),
    (["grpo", "arpo"], without(TREES, SHARED)),
    (["igpo", "arpo"], without(TREES, f"setup update evaluate Memory read {EPISODES}") + TOOLS.split()),
    (["igpo", "pi_play"], SEVERAL_TURNS.split()),
    (["igpo", "empg"], ["Memory", "read"]),  # generate also keeps entropies in empg.py
    (["igpo", "pi_play"], [*EPISODES.split(), "ask", "cut_at_stop"]),
    (["empg", "arpo"], ["cut_at_stop"]),
    (["igpo", "critic_search"], without(f"{AGENTS}", f"{SHARED} setup update evaluate {EPISODES} {SEVERAL_TURNS}") + JUDGED.split()),
    (["empg", "critic_search"], ["play", "play_turns"]),  # without IGPO's scorer
    (["grpo", "dapo"], ["evaluate"]),
    (["grpo", "gdpo"], ["update"]),
    (["spiral_rae", "advantage_alignment"], ["update", "Completion"]),  # parts are of whole games
    (["grpo", "dr_mas"], without(TEAM, f"{SHARED} {ONE_TURN}")),
    (["grpo", "hpt"], without(BOTH_TERMS, f"{SHARED} {ONE_TURN} evaluate")),
    (["grpo", "ampo"], without(TEACHERS, f"{SHARED} {ONE_TURN} evaluate")),
    (["grpo", "opd"], without(DISTILLED, f"{SHARED} {ONE_TURN} evaluate")),
    (["grpo", "unlikeliness"], without(RARE, f"{SHARED} {ONE_TURN} setup")),
    (["opd", "unlikeliness"], ["add_methods", "hidden_states"]),
    (["grpo", "dipllm"], SCORED.split()),
    (["spiral_rae", "dipllm"], ["model_path"]),
    (["hpt", "ampo"], ["load_problems"]),
    (["grpo", "nash_preference"], without(PREFERENCES, f"{SHARED} {ONE_TURN}")),
    (["grpo", "pi_play"], without(THREE_MODELS, SHARED)),
    (["grpo", "spiral_rae"], without(GAMES, f"{SHARED} {ONE_TURN}")),
    (["grpo", "advantage_alignment"], without(GAMES, f"{SHARED} {ONE_TURN}")),
    (["unimodal_poisson", "fm3q", "arac", "seqwm"], CONTROL.split()),
    (["fm3q", "arac", "seqwm"], OFF_POLICY.split()),
    (["fm3q", "seqwm"], ["updates_due", "find_maker", "as_vector"]),
    (["mdpo", "seqwm"], "action_ends as_actions check_finite".split()),
    (["unimodal_poisson", "meta_dt"], f"{CONTROL} load_function check_finite".split()),
    (["unimodal_poisson", "mdpo"], f"{CONTROL} {PPO} {TASKS}".split()),
    (["unimodal_poisson", "stream_x"], TASKS.split()),
    (["fm3q", "mdpo"], ["update_target"]),
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
