"""The folder of FlashInfer's kernels of one rank, of several that MPI starts: see `take_own_folder`.

From about 1.4 on TensorRT-LLM gives each rank its own folder (`llmapi/mpi_session.py`), unless
FLASHINFER_WORKSPACE_BASE is set, as it is where kernels are kept.

A rank imports this module before TensorRT-LLM, so it imports little.
"""

import pickle
from collections.abc import Callable
from typing import Any

from djl_trtllm.executor.kernels import kept_folder, take_own_folder


def with_own_kernels(task: Callable[..., Any], /, *args: Any, **options: Any) -> tuple[Callable[..., Any], Any, Any]:
    """A task for a rank, and its arguments: the same, or a task that takes its own folder before the other is
    unpickled.

    Unpickling a task of TensorRT-LLM imports FlashInfer, which reads the variable then.
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
