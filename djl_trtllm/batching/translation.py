"""Turns a request into executor messages (token ids) and the sequences that decode their output, and back."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from djl_trtllm.batching.ranked_sequence import RankedSequence
from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.errors import GenerationError, InvalidRequestError, RequestError
from djl_trtllm.executor.protocol import Delta, Refusal, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, FinishReason, GenerationRequest

_MAX_CACHED_STOPS = 1024
_MAX_CACHED_TEXTS = 16_384
_NONE: Mapping[int, Any] = MappingProxyType({})


class Translator:
    """`engine_stops`: whether the executor ends sequences at stop ids and stop strings (see `Limits.stops`).

    `seeded`: whether its tokens follow from the seed; without it no sequence has one.
    """

    def __init__(self, tokenizer: Tokenizer, engine_stops: bool = True, *, seeded: bool = True) -> None:
        self._tokenizer = tokenizer
        self._engine_stops = engine_stops
        self._seeded = seeded
        # Some models end with a token that their tokenizer does not list as special.
        self._special_ids = tokenizer.special_ids | tokenizer.end_ids
        self._text_of = functools.lru_cache(_MAX_CACHED_TEXTS)(self._text_inside)
        self._is_exact_in_tokens = functools.lru_cache(_MAX_CACHED_STOPS)(self._survives_tokenising)

    def sequences(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> list[OutputSequence]:
        """The sequences of a request, each with its seed."""
        sampling = request.sampling
        seed = None
        if sampling.do_sample and self._seeded:
            seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        shown: Mapping[int, str] = _NONE
        if request.shown_tokens:
            shown = {id_: text for text in request.shown_tokens if (id_ := self._special_id(text)) is not None}
        stop_ids = _NONE if self._is_stopped_by_engine(request) else self._reasons(request)
        kind = functools.partial(RankedSequence, text_of=self._text_of) if request.top_logprobs else OutputSequence
        return [
            kind(
                index=index,
                texts=self._tokenizer.texts,
                special_ids=self._special_ids,
                shown=shown,
                prompt_ids=prompt_ids,
                stop=request.stop,
                stop_ids=stop_ids,
                seed=None if seed is None else (seed + index) % 2**64,
                logprobs=_wants_logprobs(request),
            )
            for index in range(sampling.sequences)
        ]

    def ending(self, delta: Delta) -> tuple[FinishReason, RequestError | None]:
        """How the executor has ended a sequence. It does not distinguish the model's end tokens from other stop ids."""
        assert delta.finish is not None
        if isinstance(delta.error, Refusal):
            return delta.finish, InvalidRequestError(delta.error.message)
        if delta.error:
            return delta.finish, GenerationError(delta.error)
        if delta.finish in (FinishReason.STOP, FinishReason.END_TOKEN):
            ended_by = delta.token_ids[-1] if delta.token_ids else None
            return FinishReason.END_TOKEN if ended_by in self._tokenizer.end_ids else FinishReason.STOP, None
        return delta.finish, None

    def message(
        self,
        request_id: int,
        request: GenerationRequest,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        seed: int | None,
        adapter: Adapter | None,
        origin: str = "",
    ) -> Submit:
        """The message that starts one sequence, or all beams, in the executor."""
        sampling = replace(
            request.sampling,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        stops = self._is_stopped_by_engine(request)
        return Submit(
            request_id,
            prompt_ids,
            sampling,
            self._stop_ids(request) if stops else [],
            [text for text in request.stop if self._is_exact_in_tokens(text)] if stops else [],
            list(request.bad),
            request.guide,
            adapter,
            _wants_logprobs(request),
            request.top_logprobs,
            origin,
        )

    def learn_stops(self, request: GenerationRequest) -> None:
        """Find out about the stop strings of a request what its messages need."""
        if self._is_stopped_by_engine(request):
            for text in request.stop:
                self._is_exact_in_tokens(text)

    def _special_id(self, text: str) -> int | None:
        id_: int | None = self._tokenizer.raw.token_to_id(text)
        return id_ if id_ in self._special_ids else None

    def _is_stopped_by_engine(self, request: GenerationRequest) -> bool:
        # A beam that is cut later would not be the best one.
        return self._engine_stops or request.sampling.beam_width > 1

    def _stop_ids(self, request: GenerationRequest) -> list[int]:
        end_ids = () if request.sampling.ignore_eos else self._tokenizer.end_ids
        return [*end_ids, *request.stop_token_ids]

    def _reasons(self, request: GenerationRequest) -> dict[int, FinishReason]:
        """Stop ids, with the reason that ending at one of them has."""
        end_ids = self._tokenizer.end_ids
        return {
            stop_id: FinishReason.END_TOKEN if stop_id in end_ids else FinishReason.STOP
            for stop_id in self._stop_ids(request)
        }

    def _text_inside(self, token_id: int) -> str:
        """A token's text inside a text: alone, some tokenizers leave out the space that it begins with."""
        before = self._tokenizer.encode("a", False)[-1:]
        text = self._tokenizer.decode([*before, token_id], False)
        return text[len(self._tokenizer.decode(before, False)) :]

    def _survives_tokenising(self, text: str) -> bool:
        """Whether a stop string survives tokenising and decoding.

        An engine stops at tokens. If normalising changes the string, the engine would stop at another text.
        """
        return self._tokenizer.decode(self._tokenizer.encode(text, False), False) == text


def _wants_logprobs(request: GenerationRequest) -> bool:
    # Ranking needs the log-probabilities, whether or not the client asked for them.
    return request.logprobs or request.sampling.best_of is not None
