"""The decoding loop that the scripts had up to version 1.0, to compare today's with: the same tokens, slower on a GPU.

Its cache grows by torch.cat at every token, and Python starts every kernel of every step.
"""

import torch
import transformers
from torch import Tensor

from algorithms import grpo


@torch.no_grad()
def generate(model, prompts: list[list[int]], args, seeds=None) -> list[grpo.Completion]:
    """As generate of grpo.py: a completion of each prompt, sampled with one seed for each, or greedy."""
    written, logprobs, _, is_end = decode(model, prompts, args, seeds)
    ends_before = is_end.cumsum(1) - is_end.long()
    lengths = (ends_before == 0).sum(1).tolist()
    completions = []
    for row in zip(prompts, written.tolist(), logprobs.tolist(), lengths, is_end.any(1).tolist()):
        prompt, ids, values, length, ended = row
        completions.append(grpo.Completion(prompt, ids[:length], values[:length], ended))
    return completions


@torch.no_grad()
def decode(model, prompts: list[list[int]], args, seeds=None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their log-probabilities, the entropies of what they were drawn from, and which are end tokens. (B,T) each"""
    device = model.device
    steps = args.max_completion_length
    ends = torch.tensor(model.generation_config.eos_token_id, device=device)
    if seeds:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = torch.stack([torch.rand(steps, generator=g) for g in generators]).to(device)
    shape = len(prompts), steps
    written = torch.zeros(shape, dtype=torch.long, device=device)
    logprobs = torch.zeros(shape, device=device)
    entropies = torch.zeros(shape, device=device)
    cache, logits = read_prompts(model, prompts)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(cache.get_seq_length())
    columns = torch.arange(width + steps, device=device)
    filled = (columns < prompt_lengths[:, None]) | (columns >= width)
    positions = filled.cumsum(1) - 1
    rows = torch.arange(len(prompts), device=device)
    live = torch.ones_like(rows, dtype=torch.bool)
    for t in range(steps):
        logp = (logits.float() / args.temperature).log_softmax(1)
        tokens = grpo.sample_tokens(logp, uniform[rows, t]) if seeds else logp.argmax(1)
        written[rows, t] = tokens
        logprobs[rows, t] = logp.gather(1, tokens[:, None])[:, 0]
        entropies[rows, t] = -(logp.exp() * logp).nan_to_num(0).sum(1)
        live = live & ~torch.isin(tokens, ends)
        if t == steps - 1:
            break
        if device.type == "cpu" or t % 8 == 7:
            keep = live.nonzero()[:, 0]
            if len(keep) == 0:
                break
            if len(keep) <= 0.75 * len(live):
                cache.batch_select_indices(keep)
                rows, tokens, live = rows[keep], tokens[keep], live[keep]
                filled, positions = filled[keep], positions[keep]
        last = width + t
        query = positions[:, last : last + 1]
        key = positions[:, : last + 1]
        out = model(
            tokens[:, None],
            attention_mask=grpo.attention_masks(model, filled[:, None, : last + 1], query, key),
            position_ids=query,
            past_key_values=cache,
        )
        logits = out.logits[:, -1]
    return written, logprobs, entropies, torch.isin(written, ends)


def read_prompts(model, prompts: list[list[int]]) -> tuple[transformers.DynamicCache, Tensor]:
    """The cache of all rows, each different prompt computed once, and the next logits, (B,V)."""
    places = {tuple(prompt): 0 for prompt in prompts}
    places = {prompt: place for place, prompt in enumerate(places)}
    ids = [torch.tensor(prompt) for prompt in places]
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(model.device)
    positions = torch.arange(ids.size(1), device=model.device)[None]
    visible = positions[:, None, :] <= positions[:, :, None]
    cache = transformers.DynamicCache()
    hidden = model.base_model(
        ids,
        attention_mask=grpo.attention_masks(model, visible, positions, positions),
        position_ids=positions.expand(ids.shape),
        past_key_values=cache,
    ).last_hidden_state
    last = [hidden[place, len(prompt) - 1] for prompt, place in places.items()]
    logits = model.logits_from_hidden(inputs_embeds=torch.stack(last)[None]).logits[0]
    rows = torch.tensor([places[tuple(prompt)] for prompt in prompts], device=model.device)
    cache.batch_select_indices(rows)
    return cache, logits[rows]
