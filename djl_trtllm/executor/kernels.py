"""The folders in which compilers keep an engine's kernels for later engine processes.

An engine's own compilers keep theirs in $HOME and $TMPDIR, which end with a container.

A rank that MPI starts imports this module before its engine, so it imports little.
"""

import fcntl
import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

_FLASHINFER = "FLASHINFER_WORKSPACE_BASE"
_CACHES = {
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TRTLLM_DG_CACHE_DIR": "tensorrt_llm",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variables of compilers that keep kernels for any number of processes, and the folder of each."""
KEPT = "DJL_TRTLLM_KERNELS"
"""The environment variable of this project that names the folder of all kernels."""

_held: list[TextIO] = []
"""The lock of this process's own folder, as long as the process lives."""


def keep_kernels(folder: Path) -> None:
    """Let compilers keep their kernels in `folder`, but for those whose folder the environment names."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"compiled kernels are not kept for the next start: {error}", flush=True)
        return
    os.environ[KEPT] = str(folder)
    for name, subfolder in _CACHES.items():
        os.environ.setdefault(name, str(folder / subfolder))
    if _FLASHINFER not in os.environ:
        os.environ[_FLASHINFER] = str(folder)  # it makes .cache/flashinfer there
        take_own_folder(str(folder), 0, 1)


def kept_folder() -> str | None:
    """The folder of `keep_kernels`, in this process and those below it, if FlashInfer keeps its kernels there."""
    folder = os.environ.get(KEPT)
    return folder if folder is not None and Path(folder) in Path(os.environ.get(_FLASHINFER, ""), "x").parents else None


def take_own_folder(folder: str, rank: int, ranks: int) -> None:
    """Give FlashInfer a folder inside `folder` that no other process has while this one lives.

    FlashInfer maps a kernel's library into memory before it takes the lock under which another process links it anew:
    processes that share a folder may end with SIGBUS (TensorRT-LLM #17233, #18278 and #18368 of August 2026). Call it
    before FlashInfer is imported. The same rank gets the same folder at the next start, if it is free then.
    """
    for number in () if _held else itertools.count(rank, ranks):
        own = Path(folder, f"rank-{number}")
        try:
            own.mkdir(parents=True, exist_ok=True)
            lock = (own / ".lock").open("a", encoding="utf-8")
        except OSError as error:
            print(f"rank {rank} shares the folder of FlashInfer's kernels with other ranks: {error}", flush=True)
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        except OSError:  # the file system has no locks: at least the ranks of this engine do not share it
            pass
        _held.append(lock)
        os.environ[_FLASHINFER] = str(own)
        return


def with_own_kernels(task: Callable[..., Any], /, *args: Any, **options: Any) -> tuple[Callable[..., Any], Any, Any]:
    """A task for a rank of MPI, and its arguments: the same, or one that takes its own folder before it is unpickled.

    Unpickling a task of TensorRT-LLM's imports FlashInfer, which reads the variable then. From about 1.4 on
    TensorRT-LLM gives each rank its own folder (`llmapi/mpi_session.py`), unless FLASHINFER_WORKSPACE_BASE is set, as
    it is where kernels are kept.
    """
    folder = kept_folder()
    if folder is None:
        return task, args, options
    return _run, (folder, pickle.dumps((task, args, options))), {}


def _run(folder: str, pickled: bytes) -> Any:
    from mpi4py import MPI

    if (ranks := MPI.COMM_WORLD.Get_size()) > 1:
        take_own_folder(folder, MPI.COMM_WORLD.Get_rank(), ranks)
    task, args, options = pickle.loads(pickled)  # noqa: S301 - of this process's parent
    return task(*args, **options)
