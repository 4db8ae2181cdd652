"""Measures the largest `max_num_tokens` of a model: builds, loads and serves it in one process after another.

`max_token_finder` is that of LMI's TensorRT-LLM toolkit, which the finder document's program calls.

`tensorrt_llm_toolkit.py`, beside this package, gives it the name of the document where the real toolkit is not
installed.
"""

from collections.abc import Mapping
from typing import Any

from djl_trtllm.errors import ConfigError, DjlTrtllmError

_MODEL = ("model_id", "option.model_id")
_DEGREE = ("tensor_parallel_degree", "option.tensor_parallel_degree")


def max_token_finder(
    properties: Mapping[str, Any],
    *,
    requests: int | None = None,
    request_tokens: int | None = None,
    memory: int | str | None = None,
    precision: float | None = None,
    fresh: bool = False,
) -> tuple[str, Any, int]:
    """Measure the largest max_num_tokens of a model here; half of it is for `option.max_num_tokens`.

    `properties` are options, with or without `option.`: `model_id` (a directory, a model of the hub, an s3:// address)
    and `tensor_parallel_degree`, and any other of docs/options.md. Returns the model and the degree as they were given
    (1 without one), and the maximum. Progress is on standard error. An interrupted measurement goes on when it is
    called again. The keyword arguments are the flags of `djl-trtllm size --measure`: on a CPU give `requests` and
    `request_tokens` as the traffic has them, because a trial with the whole load takes minutes there.

    Raises ConfigError for what is no option, and DjlTrtllmError if the model does not fit at all or a trial fails for
    anything but memory.
    """
    from rich.console import Console

    from djl_trtllm.finder.measure import Settings, load_of, measure, memory_bound
    from djl_trtllm.progress import display_on

    model = next((properties[name] for name in _MODEL if properties.get(name) is not None), None)
    if model is None:
        raise ConfigError("properties has no model_id: expected a directory, OWNER/NAME or an s3:// address")
    options = {name: value for name, value in properties.items() if name not in _MODEL}
    degree = next((properties[name] for name in _DEGREE if properties.get(name) is not None), 1)
    load, settings = load_of(requests, request_tokens), Settings(memory_bound("memory", memory), precision, fresh)
    found = measure(str(model), options, load, settings, display_on(Console(stderr=True)))
    if found.max_num_tokens is None:
        last = found.attempts[-1]
        raise DjlTrtllmError(
            f"{model} is out of memory with every max_num_tokens down to {last.tokens}: {last.reason}; use more GPUs "
            "(tensor_parallel_degree) or quantise it (quantize)"
        )
    return str(model), degree, found.max_num_tokens
