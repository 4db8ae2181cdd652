"""What this installation is: its version, names, script and GPUs, all from the environment."""

from __future__ import annotations

import builtins
import enum
import functools
import json
import os
import sys
import time
import traceback
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

TABLE: dict[str, Any] = json.loads(Path(os.environ["FAKE_TENSORRT_LLM_TABLE"]).read_text())
VERSION = Version(TABLE["version"])

SINCE_1_2 = Version("1.2.0rc0") <= VERSION
SINCE_1_3 = Version("1.3.0rc0") <= VERSION
ASSERTS_BEAM_WIDTH = Version("1.2.1") > VERSION
FAILS_GUIDED_REQUESTS = Version("1.2.0") <= VERSION
MIXES_POSITIONS = Version("1.4.0rc0") > VERSION
HAS_REQUEST_SEEDS = Version("1.4.0rc0") <= VERSION
REFUSES_BY_DRAFTS = Version("1.4.0rc0") <= VERSION


@functools.cache
def enable_worker_single_process_for_tp1() -> bool:
    """Once and for all, as in `llmapi/utils.py` (@03dd9bb8)."""
    return os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS", "0") == "1"


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
    "load_error_rank": None,
    "sampled": False,
    "memory": None,
    "compiles": 0,
    "gpu_bytes": 0,
    "all_reduce": None,
    "hashes_images": True,
    "processor_error": None,
    "faults": [],
}
"""What a script may hold.

- `steps_per_second`: iterations; 0 is as fast as the caller reads. `prefill_seconds`: more for one with a context.
- `end_after`: tokens after which the model emits its end token.
- `build_error`: "oom" (PyTorch's, at the weights), "quantize_oom", "build_oom" (TensorRT's), "unsupported", "option",
  "die", or the message of a RuntimeError. `load_error`: "oom", "deserialize", "die", "hang", or a message; of
  `load_error_rank`, or of all ranks.
- `sampled`: chance decides where sampled requests begin: the seed, or the one generator of samplers that ignore it.
- `memory`: what takes how much of the GPU (`memory.MemoryModel`); building, loading and iterations then run out of it.
- `compiles`: seconds for which the first iteration with a sampled request compiles; "flashinfer": it really does.
- `gpu_bytes`: what each rank really takes of a GPU. `all_reduce`: "nccl", or another backend of torch.distributed, for
  a collective operation in each iteration of several ranks.
- `hashes_images`: whether the processor can hash images; `processor_error`: the message with which it fails for them.
- `faults`: `{"action": ..., "at_token": 0, "max_new_tokens": ...}`, before token `at_token` of a request whose
  SamplingParams.max_tokens is `max_new_tokens` (of any, where that is not given). Actions: "error" (of the request,
  with `message`), "forward" (of the iteration, with `message`), "cuda" (of all iterations from now on), "raise" (the
  worker raises CppExecutorError), "lose" (the thread of responses raises, and those of the iteration are lost), "die"
  (SIGKILL), "segfault", "exit", "stop" (SIGSTOP), "hang"; on a real GPU "gpu_oom" and "gpu_assert" (of the iteration).
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
    """The memory of one GPU, in bytes."""
    return int(os.environ["FAKE_GPU_MEMORY"])


def compute_capability() -> tuple[int, int]:
    """The compute capability of the GPUs."""
    major, minor = os.environ["FAKE_GPU_COMPUTE_CAPABILITY"].split(".")
    return int(major), int(minor)


# -- names -------------------------------------------------------------------------------------------------------------
# Classes whose fields are those of the table of names.
#
# A member's type is a Python expression over `typing` and the classes here; the table's text is what is evaluated.


class _Namespace(dict[str, Any]):
    """What types may name. What the fake does not have may be anything."""

    def __missing__(self, name: str) -> Any:
        return Any


NAMESPACE = _Namespace({**vars(builtins), **vars(typing)}, Path=Path, torch=SimpleNamespace(Tensor=Any))
"""Classes add themselves."""


def has(owner: str) -> bool:
    """Whether this version has the class."""
    return owner in TABLE["owners"]


def arguments(owner: str) -> dict[str, dict[str, Any]]:
    """What the owner's constructor, or the function, takes in this version; nothing where the version lacks it."""
    return {name: member for name, member in members(owner).items() if member["kind"] == "argument"}


def members(owner: str) -> dict[str, dict[str, Any]]:
    """All names of the owner, of any kind."""
    return TABLE["owners"][owner]["members"] if has(owner) else {}


def type_of(member: dict[str, Any]) -> Any:
    """The member's type."""
    return eval(member["type"], {}, NAMESPACE)


# -- the record of constructor and generate_async calls, one JSON object per line --------------------------------------


def record(call: str, arguments: Mapping[str, Any]) -> None:
    """Append a call to FAKE_TENSORRT_LLM_LOG; nothing where that is not set."""
    path = os.environ.get("FAKE_TENSORRT_LLM_LOG")
    if path:
        line = json.dumps({"call": call, "arguments": {name: plain(value) for name, value in arguments.items()}})
        # One write to a file opened for appending: processes do not mix their lines.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)


def plain(value: Any) -> Any:
    """A value as JSON: an object by its class and its explicit fields, an enum member by its name."""
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__name__, "name": value.name}
    explicit = getattr(value, "explicit_fields", None)
    if explicit is not None:
        return {"class": type(value).__name__, **{name: plain(getattr(value, name)) for name in explicit()}}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value) if isinstance(value, Path) else repr(value)


# -- log lines of TensorRT-LLM's two loggers, and its coloured progress lines ------------------------------------------

_LEVELS = {"internal_error": 0, "error": 1, "warning": 2, "info": 3, "verbose": 4, "debug": 5, "trace": 5}
_LETTERS = {"error": "E", "warning": "W", "info": "I", "debug": "D"}
_COLOURS = {"grey": "\x1b[38;20m", "yellow": "\x1b[33;20m", "red": "\x1b[31;20m", "bold_green": "\033[1;32m"}


class Logger:
    """The Python side's: to standard output, filtered by TLLM_LOG_LEVEL."""

    def __init__(self) -> None:
        self.level = os.environ.get("TLLM_LOG_LEVEL", "warning").lower()

    def _log(self, level: str, message: str) -> None:
        if _LEVELS[level] <= _LEVELS.get(self.level, 2):
            now = time.strftime("%m/%d/%Y-%H:%M:%S")
            print(f"[{now}] [TRT-LLM] [{_LETTERS[level]}] {message}", flush=True)

    def error(self, message: str) -> None:
        self._log("error", message)

    def warning(self, message: str) -> None:
        self._log("warning", message)

    def info(self, message: str) -> None:
        self._log("info", message)


logger = Logger()


def cpp_log(level: str, message: str) -> None:
    """A line of the C++ runtime."""
    print(f"[TensorRT-LLM][{level}] {message}", flush=True)


def print_colored(message: str, colour: str | None = None) -> None:
    """A progress line, to standard error."""
    sys.stderr.write(f"{_COLOURS[colour]}{message}\x1b[0m" if colour else message)
    sys.stderr.flush()


# -- TensorRT-LLM's exceptions (facts §7.1) ----------------------------------------------------------------------------


class RequestError(RuntimeError):
    """One request failed; the engine goes on."""


class CppExecutorError(RuntimeError):
    """The engine failed."""

    def __init__(self, message: str | None = None) -> None:
        self.message = message
        self.stack_trace = traceback.format_exc()
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}\nStack trace:\n{self.stack_trace}"


# -- what a worker needs of the LLM's arguments ------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerSettings:
    """Plain data.

    `eos` is what the model emits at its end; `guided_ids` what it emits when it is guided, and `guide_problem` why it
    cannot be. `mrope`: tokens have places in images. `overlap`: PyExecutor prepares an iteration while another runs.
    `refused_by_drafts`: fields of SamplingParams that speculation does not have.
    """

    backend: str
    engine_dir: str | None
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_beam_width: int
    torch_sampler: bool
    chunked_prefill: bool
    overlap: bool
    policy: str
    tokens_per_block: int
    kv_blocks: int
    block_reuse: bool
    stream_interval: int
    iteration_stats: bool
    stats_max_iterations: int
    guided: str
    guide_problem: str | None
    guided_ids: list[int]
    lora: bool
    max_lora_rank: int
    hidden_size: int | None
    vocab_size: int | None
    eos: int | None
    script: dict[str, Any]
    mrope: bool = False
    refused_by_drafts: tuple[str, ...] = ()

    @property
    def pytorch(self) -> bool:
        return self.backend != "tensorrt"


# -- memory ------------------------------------------------------------------------------------------------------------
# What a GPU's memory holds: weights, activations by max_num_tokens, the KV cache (facts §5.1, §5.2).
#
# Only where the script has `memory`; all sizes are bytes of one rank.

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryModel:
    """`building`, `loaded` and `running` are for each token: of max_num_tokens while the engine is built and once it is
    loaded, and of an iteration beside that. `kv_cache` is for each token that it holds; None: as the model has it."""

    weights: int
    overhead: int = 0
    building: int = 0
    loaded: int = 0
    running: int = 0
    kv_cache: int | None = None

    def builds(self, max_num_tokens: int) -> bool:
        return self.weights + self.overhead + self.building * max_num_tokens <= device_memory()

    def free(self, max_num_tokens: int) -> int:
        """Once an engine is loaded, before the KV cache; negative where it cannot be."""
        return device_memory() - self.weights - self.overhead - self.loaded * max_num_tokens

    def runs(self, tokens: int, max_num_tokens: int, kv_bytes: int) -> bool:
        """Whether an iteration with this number of tokens fits beside the KV cache."""
        return self.running * tokens <= self.free(max_num_tokens) - kv_bytes


def memory_model() -> MemoryModel | None:
    """What the script says."""
    given = script()["memory"]
    return None if given is None else MemoryModel(**given)


def torch_out_of_memory() -> str:
    """PyTorch's message."""
    total = device_memory() / GIB
    return (
        f"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of {total:.2f} GiB of which 1.06 "
        f"GiB is free. Including non-PyTorch memory, this process has {total - 1.06:.2f} GiB memory in use. Of the "
        f"allocated memory {total - 2.06:.2f} GiB is allocated by PyTorch, and 130.43 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


ENGINE_OUT_OF_MEMORY = (
    "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, mCudaStream->get()): out of memory "
    "(/src/tensorrt_llm/cpp/tensorrt_llm/runtime/tllmBuffers.h:127)"
)
NO_KV_CACHE = "Impossible to fit in any sequence in kvCache"
"""resource_manager.py, `get_max_atten_window_upper_bound`; kvCacheManager.cpp has the same words."""
