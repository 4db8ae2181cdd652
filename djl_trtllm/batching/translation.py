"""A request as the executor takes it: sequences that turn its tokens into text, and messages of token ids."""

from __future__ import annotations

import functools
import secrets

from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.executor.protocol import Sampling, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, GenerationRequest, SamplingParameters

_MOST_STOPS_KNOWN = 1024


class Translator:
    """Translates requests with one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some models end with a token that their tokenizer does not list as special.
        self._special_ids = tokenizer.special_ids | tokenizer.end_ids
        self._means_itself = functools.lru_cache(_MOST_STOPS_KNOWN)(self._decodes_to_itself)

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
        """What starts one sequence, or all beams, in the executor."""
        end_ids = () if request.sampling.ignore_eos else self._tokenizer.end_ids
        return Submit(
            request_id,
            prompt_ids,
            _sampling(request.sampling, max_new_tokens, seed or 0, _wants_logprobs(request)),
            [*end_ids, *request.stop_token_ids],
            [text for text in request.stop if self._means_itself(text)],
            list(request.bad),
            request.guide,
            adapter,
        )

    def _decodes_to_itself(self, text: str) -> bool:
        """Whether the tokens of a stop string mean exactly it.

        An engine stops at tokens. Where normalising changed the string, it would stop at something else.
        """
        return self._tokenizer.decode(self._tokenizer.encode(text, False), False) == text


def _wants_logprobs(request: GenerationRequest) -> bool:
    # Ranking needs the log-probabilities, asked for or not.
    return request.logprobs or request.sampling.best_of is not None


def _sampling(sampling: SamplingParameters, max_new_tokens: int, seed: int, logprobs: bool) -> Sampling:
    return Sampling(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(sampling.min_new_tokens, max_new_tokens),
        do_sample=sampling.do_sample,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=seed,
        ignore_eos=sampling.ignore_eos,
        logprobs=logprobs,
        min_p=sampling.min_p,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        beam_width=sampling.beam_width,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        beam_search_diversity_rate=sampling.beam_search_diversity_rate,
    )
