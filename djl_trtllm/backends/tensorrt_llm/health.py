"""Whether TensorRT-LLM can go on."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import Sampling


def trouble_of(llm: Any) -> str | None:
    """Why an LLM cannot go on; None while it can.

    Before 1.3 TensorRT-LLM raises an error of its background threads only at the next request or response, and a worker
    that has failed sends nothing; so look where they leave it (`executor/executor.py`, about 1.2).
    """
    executor = getattr(llm, "_executor", None)
    errors = getattr(executor, "_error_queue", None)
    if errors is not None and (waiting := list(errors.queue)):
        return f"{type(waiting[0]).__name__}: {waiting[0]}"
    if hasattr(llm, "_check_health"):
        return None if llm._check_health() else "it reports that it is not healthy"
    if executor is None or (hasattr(executor, "is_shutdown") and executor.is_shutdown()):
        return "it has shut down"
    return None


def probe_of(message: Submit) -> Submit:
    """A request for one token that an engine takes which has taken `message`."""
    sampling = Sampling(1, beam_width=message.sampling.beam_width)
    return replace(
        message,
        prompt_ids=message.prompt_ids[:1],
        sampling=sampling,
        guide=None,
        adapter=None,
        logprobs=False,
        top_logprobs=0,
    )
