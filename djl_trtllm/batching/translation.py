"""Turns a request into executor messages (token ids) and into the sequences that decode their output."""

from __future__ import annotations

import functools
import secrets

from msgspec.structs import replace

from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, GenerationRequest

_MAX_CACHED_STOPS = 1024


class Translator:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some models end with a token that their tokenizer does not list as special.
        self._special_ids = tokenizer.special_ids | tokenizer.end_ids
        self._is_exact_in_tokens = functools.lru_cache(_MAX_CACHED_STOPS)(self._survives_tokenising)

    def sequences(self, request: GenerationRequest, prompt_ids: list[int]) -> list[OutputSequence]:
        """The sequences of a request, each with its seed."""
        sampling = request.sampling
        seed = None
        if sampling.do_sample:
            seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        return [
            OutputSequence(
                index=index,
                tokenizer=self._tokenizer.raw,
                special_ids=self._special_ids,
                prompt_ids=prompt_ids,
                stop=request.stop,
                seed=None if seed is None else (seed + index) % 2**64,
                logprobs=_wants_logprobs(request),
            )
            for index in range(sampling.sequences)
        ]

    def message(
        self,
        request_id: int,
        request: GenerationRequest,
        prompt_ids: list[int],
        max_new_tokens: int,
        seed: int | None,
        adapter: Adapter | None,
    ) -> Submit:
        """The message that starts one sequence, or all beams, in the executor."""
        sampling = replace(
            request.sampling,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        end_ids = () if request.sampling.ignore_eos else self._tokenizer.end_ids
        return Submit(
            request_id,
            prompt_ids,
            sampling,
            [*end_ids, *request.stop_token_ids],
            [text for text in request.stop if self._is_exact_in_tokens(text)],
            list(request.bad),
            request.guide,
            adapter,
            _wants_logprobs(request),
        )

    def _survives_tokenising(self, text: str) -> bool:
        """Whether a stop string survives tokenising and decoding.

        An engine stops at tokens. If normalising changes the string, the engine would stop at another text.
        """
        return self._tokenizer.decode(self._tokenizer.encode(text, False), False) == text


def _wants_logprobs(request: GenerationRequest) -> bool:
    # Ranking needs the log-probabilities, whether or not the client asked for them.
    return request.logprobs or request.sampling.best_of is not None
