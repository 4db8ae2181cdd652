"""How many tokens a request gets (base_worker.py, `_deduce_max_tokens`; facts §7.1)."""

from __future__ import annotations

from .logger import logger
from .requests import GenerationRequest
from .worker_settings import WorkerSettings


def deduce_max_tokens(request: GenerationRequest, settings: WorkerSettings) -> int:
    max_tokens: int | None = request.sampling_params.max_tokens
    limit = settings.max_seq_len
    length = len(request.prompt_token_ids)
    if limit is None:
        logger.warning("`default_max_tokens` cannot be deduced")
        if max_tokens is None:
            raise ValueError("`max_tokens` must be set when `default_max_tokens` cannot be deduced")
        return max_tokens
    if not settings.pytorch and length > limit:
        raise AssertionError(f"`prompt_token_ids` length ({length}) is greater than `max_seq_len` ({limit})")
    default = limit - length
    if default <= 0:
        logger.warning(
            f"`default_max_tokens` ({default}) should be greater than 0, `default_max_tokens` ({default}) = "
            f"max_seq_len ({limit}) - `splited_prompt_len` ({length}) - `query_token_len` (0)"
        )
        if max_tokens is None:
            raise ValueError("`max_tokens` must be set when `default_max_tokens` is illegal")
    if max_tokens is None:
        return default
    if max_tokens > default:
        logger.warning(
            f"User-specified `max_tokens` ({max_tokens}) is greater than deduced `default_max_tokens` "
            f"({default}), using default_max_tokens instead."
        )
        return default
    return max_tokens
