"""What this installation is: its version, names, script and GPUs, all from the environment."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from packaging.version import Version

TABLE: dict[str, Any] = json.loads(Path(os.environ["FAKE_TENSORRT_LLM_TABLE"]).read_text())
VERSION = Version(TABLE["version"])

SINCE_1_1 = Version("1.1") <= VERSION
SINCE_1_2 = Version("1.2.0rc0") <= VERSION
SINCE_1_3 = Version("1.3.0rc0") <= VERSION
ASSERTS_BEAM_WIDTH = Version("1.2.1") > VERSION
FAILS_GUIDED_REQUESTS = Version("1.2.0") <= VERSION
HAS_REQUEST_SEEDS = Version("1.4.0rc0") <= VERSION
HAS_ENGINE_BACKEND = Version("1.3.0rc21") > VERSION


@functools.cache
def script() -> dict[str, Any]:
    """The behaviour that `fake_tensorrt_llm` was given, with its defaults."""
    return {**DEFAULTS, **json.loads(os.environ.get("FAKE_TENSORRT_LLM_SCRIPT", "{}"))}


DEFAULTS: dict[str, Any] = {
    "steps_per_second": 0,
    "prefill_seconds": 0,
    "end_after": None,
    "build_seconds": 0,
    "build_error": None,
    "load_seconds": 0,
    "load_error": None,
    "cancel_latency": 1,
    "guided_text": "{}",
    "sampled": False,
    "memory": None,
    "faults": [],
}
"""What a script may hold.

- `steps_per_second`: iterations; 0 is as fast as the caller reads. `prefill_seconds`: more for one with a context.
- `end_after`: tokens after which the model emits its end token.
- `build_error`: "oom" (PyTorch's, at the weights), "quantize_oom", "build_oom" (TensorRT's), "unsupported", "option",
  "die", or the message of a RuntimeError. `load_error`: "oom", "deserialize", "die", "hang", or a message.
- `cancel_latency`: iterations from an abort to its effect, at least 1. `guided_text`: the output of guided requests.
- `sampled`: chance decides where sampled requests begin: the seed, or the one generator of samplers that ignore it.
- `memory`: what takes how much of the GPU (`memory.MemoryModel`); building, loading and iterations then run out of it.
- `faults`: `{"action": ..., "at_token": 0, "max_new_tokens": ...}`, before token `at_token` of a request whose
  SamplingParams.max_tokens is `max_new_tokens` (of any, where that is not given). Actions: "error" (of the request,
  with `message`), "forward" (of the iteration, with `message`), "cuda" (of all iterations from now on), "raise" (the
  worker raises CppExecutorError), "die" (SIGKILL), "segfault", "exit", "stop" (SIGSTOP), "hang".
"""


def device_count() -> int:
    """What `torch.cuda.device_count()` says: CUDA_VISIBLE_DEVICES counts."""
    present = int(os.environ["FAKE_GPUS"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    count = 0
    for device in visible.split(","):
        # CUDA ends the list at the first device that is not there.
        if not device.strip().isdigit() or int(device) >= present:
            break
        count += 1
    return count


def device_memory() -> int:
    """Of one GPU, in bytes."""
    return int(os.environ["FAKE_GPU_MEMORY"])


def compute_capability() -> tuple[int, int]:
    """Of the GPUs."""
    major, minor = os.environ["FAKE_GPU_COMPUTE_CAPABILITY"].split(".")
    return int(major), int(minor)
