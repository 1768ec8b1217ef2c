"""What a model writes, computed once: equal weights, prompts, flags and random numbers give equal texts.

Most runs of a test file begin with the policy, the problems and the seed of another run. `remembered` spares them the
first step's texts and the first evaluation, and a resumed run what the whole run wrote. A run that differs in anything
`generate` reads gets texts of its own.
"""

import copy
import hashlib
import inspect
import re


def remembered(generate):
    """generate() of a script of the language family, which keeps all that it has written."""
    if "seeds" in inspect.signature(generate).parameters:
        return generate  # of grpo.py and dapo.py, whose runs are short
    flags = sorted(set(re.findall(r"\bargs\.(\w+)", inspect.getsource(generate))))
    known = {}

    def lookup(model, prompts, num_generations, args, generator):
        if hasattr(model, "unshard"):  # FSDP: all processes must take part
            return generate(model, prompts, num_generations, args, generator)
        read = [prompts, num_generations, model.generation_config.eos_token_id, [getattr(args, flag) for flag in flags]]
        key = hashlib.blake2b(repr(read).encode())
        for tensor in [*model.parameters(), *(g.get_state() for g in generator or [])]:
            key.update(tensor.detach().numpy().tobytes())
        key = (generator is None, key.digest())
        if key not in known:
            known[key] = generate(model, prompts, num_generations, args, generator)
        model.eval()  # as generate does
        return copy.deepcopy(known[key])

    return lookup
