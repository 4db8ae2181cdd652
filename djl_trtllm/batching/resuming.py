"""How a sequence goes on in another engine process: its prompt and the tokens it has so far are the new prompt.

That is the same sequence for a model, whose next token depends on nothing but the tokens before it. It is not for what
an engine remembers of a sequence beside its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from djl_trtllm.executor.protocol import Limits, Submit
from djl_trtllm.request import Sampling

_HISTORY = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
"""Fields with which an engine treats generated tokens and prompt tokens differently."""
_NEUTRAL = Sampling()
_SEED_STEP = 0x9E3779B97F4A7C15
"""An odd number far from 0 modulo 2**64: sequences of one request have neighbouring seeds."""


def can_resume(message: Submit, generated: int, limits: Limits) -> bool:
    """Whether a sequence with this number of generated tokens can go on in another engine process with these limits.

    One without tokens always can: it begins there.
    """
    if not generated:
        return True
    sampling = message.sampling
    return not (
        sampling.beam_width > 1
        or message.guide is not None
        or message.bad
        or sampling.min_new_tokens > generated
        or any(getattr(sampling, name) != getattr(_NEUTRAL, name) for name in _HISTORY)
        or len(message.prompt_ids) + generated > (limits.max_prompt_len or limits.max_seq_len)
    )


def resumed(message: Submit, token_ids: Sequence[int]) -> Submit:
    """The message that starts a sequence, or lets it go on after the tokens that it has, with its prompt as a list.

    A seeded sequence draws from there on with another seed, which follows from its own and the position: with its own
    the engine would draw the random numbers of its beginning again.
    """
    prompt_ids = [*message.prompt_ids, *token_ids]
    if not token_ids:
        return replace(message, prompt_ids=prompt_ids)
    sampling, generated = message.sampling, len(token_ids)
    seed = None if sampling.seed is None else (sampling.seed + generated * _SEED_STEP) % 2**64
    left = replace(sampling, max_new_tokens=sampling.max_new_tokens - generated, min_new_tokens=0, seed=seed)
    return replace(message, prompt_ids=prompt_ids, sampling=left)
