"""The requests of a trial."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from djl_trtllm.request import GenerationRequest, Sampling
from djl_trtllm.service import Model

NEW_TOKENS = 8
_FIRST_ID = 3  # smaller ids are usually those of special tokens


class Load(msgspec.Struct, frozen=True):
    """`requests` at a time, each with a prompt of `tokens` tokens: what the finder document's tables were tested with.

    A model with smaller limits gets as long prompts as it takes.
    """

    requests: int = 128
    tokens: int = 3700

    def within(self, max_input_len: int, max_seq_len: int) -> Load:
        """This load with prompts that these limits allow."""
        return msgspec.structs.replace(self, tokens=max(1, min(self.tokens, max_input_len, max_seq_len - NEW_TOKENS)))


def prompt_limit(model: Model) -> int:
    """The longest prompt of a prepared model: TensorRT-LLM splits prompts only with chunked prefill."""
    options, limit = model.options, model.limits.max_input_len
    unsplit = model.gpus > 0 and not options.enable_chunked_prefill
    return min(limit, options.max_num_tokens) if unsplit and options.max_num_tokens else limit


def requests_of(load: Load, vocabulary: int) -> Iterator[GenerationRequest]:
    """The requests, with prompts of random tokens, so that no two share KV cache blocks."""
    chance = random.Random(load.tokens)  # noqa: S311  # the same prompts in every trial
    last = max(_FIRST_ID, vocabulary - 1)
    for _ in range(load.requests):
        prompt = [chance.randint(_FIRST_ID, last) for _ in range(load.tokens)]
        yield GenerationRequest(prompt_ids=prompt, sampling=Sampling(max_new_tokens=NEW_TOKENS))
