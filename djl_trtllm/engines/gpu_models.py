"""The GPUs that a plan can be made for where they are not (`sizing/gpus.toml`)."""

from __future__ import annotations

from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.machines import of_gpu


def gpus_named(text: str) -> tuple[Gpu, ...]:
    """The GPUs of `h100`, `h100:8` or `8xh100`, a value of --gpu. Raises SizingError."""
    try:
        machine = of_gpu(text)
    except SizingError as error:
        raise SizingError(f"--gpu {error}") from None
    return (Gpu(f"NVIDIA {machine.gpu}", machine.compute_capability, machine.memory),) * (machine.gpus or 1)
