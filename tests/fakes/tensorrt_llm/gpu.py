"""What a rank does on a GPU: kernels compiled at their first use, memory that is really held, collective operations.

Kernels are those of FlashInfer, or a program named `nvcc` that sleeps: the kernel is kept where FlashInfer keeps its.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_held: list[Any] = []
_communicators: list[Any] = []
"""The tensor that the ranks add up, once they have met."""


def sample(compiles: float | str) -> None:
    """What TorchSampler does in an iteration with a request that samples: compile the kernel, the first time."""
    if compiles == "flashinfer":
        _sample_by_flashinfer()
    elif compiles:
        _pretend_to_compile(float(compiles))


def _sample_by_flashinfer() -> None:
    import torch
    from flashinfer.sampling import top_k_top_p_sampling_from_logits

    top_k_top_p_sampling_from_logits(torch.zeros(1, 32_000, device="cuda"), 40, 0.9, deterministic=True)
    torch.cuda.synchronize()


def _pretend_to_compile(seconds: float) -> None:
    folder = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home())) / ".cache" / "flashinfer"
    kernel = folder / "sampling.so"
    if kernel.exists():
        return
    sleep = shutil.which("sleep")
    assert sleep is not None
    with tempfile.TemporaryDirectory() as directory:
        compiler = Path(directory, "nvcc")
        compiler.symlink_to(sleep)
        subprocess.run([str(compiler), str(seconds)], check=True)
    folder.mkdir(parents=True, exist_ok=True)
    kernel.touch()


def hold(size: int, rank: int) -> None:
    """Take this number of bytes, until the process ends."""
    import torch

    device = f"cuda:{rank % torch.cuda.device_count()}"
    _held.append(torch.empty(size, dtype=torch.uint8, device=device))


def open_context() -> None:
    """`torch.cuda.Stream()` in proxy.py: the process that has the LLM has a context on GPU 0, some hundred MB."""
    import torch

    _held.append(torch.cuda.Stream())


def join(rank: int, ranks: int, meeting: str, backend: str) -> None:
    """Make the communicator of all ranks, NCCL's for `backend="nccl"`; `meeting` is a path that all of them know."""
    import torch
    import torch.distributed

    device = f"cuda:{rank % torch.cuda.device_count()}" if backend == "nccl" else "cpu"
    torch.distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    _communicators.append(torch.ones(1 << 16, device=device))
    all_reduce()


def all_reduce() -> None:
    """The collective operation of an iteration, if there is a communicator. Without one of the ranks it never ends."""
    if _communicators:
        import torch
        import torch.distributed

        ranks, summed = torch.distributed.get_world_size(), _communicators[0].clone()
        torch.distributed.all_reduce(summed)
        assert int(summed[-1].item()) == ranks


def fail(action: str) -> None:
    """Raise what an iteration raises that runs out of memory, or whose kernel fails an assertion."""
    import torch

    if action == "gpu_oom":
        while True:
            _held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
    torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]
    torch.cuda.synchronize()
