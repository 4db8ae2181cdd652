"""How many sequences a rolling batch holds, and how long each may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from djl_trtllm.errors import InvalidRequestError, PromptTooLongError
from djl_trtllm.executor.protocol import Limits
from djl_trtllm.request import GenerationRequest


@dataclass(frozen=True)
class BatchLimits:
    """Lengths are in tokens, the rest in sequences.

    `max_batch_size` sequences run at once (option.max_rolling_batch_size), `max_queue_size` may wait
    (job_queue_size). A prompt has at most `max_input_len` tokens, its output `max_output_len`, and both together
    `max_seq_len`. A request goes on in a new engine process up to `max_resumes` times, if its own is lost.
    """

    max_batch_size: int
    max_queue_size: int
    max_input_len: int
    max_output_len: int
    max_seq_len: int
    vocab_size: int | None = None
    """Ids from here on are refused: the tokenizer has them and the model does not. None if it has none of them."""
    max_resumes: int = 0


class SequenceLimits:
    """How long a sequence may be: the smaller of what the batch and the engine allow."""

    def __init__(self, batch: BatchLimits, engine: Limits) -> None:
        self._batch = batch
        self._engine = engine
        self._max_seq_len = min(batch.max_seq_len, engine.max_seq_len)

    def fit(self, request: GenerationRequest, prompt_ids: list[int]) -> tuple[list[int], int]:
        """The prompt (truncated if asked) and the number of tokens to generate.

        A number that the client gives is refused where it is over a limit; a default is lowered to it. Raises
        InvalidRequestError for what can never run.
        """
        if request.truncate is not None:
            prompt_ids = prompt_ids[-request.truncate :]
        length, wanted, batch = len(prompt_ids), request.sampling.max_new_tokens, self._batch
        if not length:
            raise InvalidRequestError("the prompt is empty: it has no tokens")
        if batch.vocab_size is not None and (highest := max(prompt_ids)) >= batch.vocab_size:
            raise InvalidRequestError(
                f"the prompt has a token with the id {highest}, which the tokenizer has and the model does not: its "
                f"ids end at {batch.vocab_size - 1}; leave that special token out"
            )
        if length > batch.max_input_len:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, max_input_len is {batch.max_input_len}: "
                "shorten it, or raise option.max_input_len"
            )
        if wanted > batch.max_output_len:
            raise InvalidRequestError(
                f"the request asks for {wanted} new tokens, max_output_len is {batch.max_output_len}: "
                "ask for fewer, or raise option.max_output_len"
            )
        room = self._max_seq_len - length
        if room < max(wanted, 1):
            raise PromptTooLongError(
                f"the prompt has {length} tokens and max_new_tokens is {wanted or 'not set'}; together they may have "
                f"{self._max_seq_len} (max_seq_len): {max(room, 0)} are left for the output"
            )
        wanted = wanted or min(request.default_new_tokens or room, room, batch.max_output_len)
        if request.sampling.min_new_tokens > wanted:
            raise InvalidRequestError(
                f"the request asks for at least {request.sampling.min_new_tokens} new tokens, and it gets {wanted} at "
                f"most (max_output_len is {batch.max_output_len}, max_seq_len {self._max_seq_len}): ask for fewer"
            )
        beams, available = request.sampling.beam_width, self._engine.kv_blocks
        blocks = self.blocks(length, wanted) * beams
        if available and blocks > available:
            each = "" if beams == 1 else f" in {beams} beams"
            raise PromptTooLongError(
                f"{length} prompt tokens and {wanted} new tokens{each} need {blocks} KV cache blocks, the engine has "
                f"{available}: shorten the request, or give the KV cache more memory "
                "(option.max_tokens_in_paged_kv_cache, option.kv_cache_free_gpu_mem_fraction)"
            )
        return prompt_ids, wanted

    def blocks(self, prompt_tokens: int, new_tokens: int) -> int:
        """KV cache blocks of a sequence to its end, and one to spare (with it, no request was ever lost)."""
        return math.ceil((prompt_tokens + new_tokens) / self._engine.block_size) + 1
