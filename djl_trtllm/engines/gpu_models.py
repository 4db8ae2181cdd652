"""The GPUs that a plan can be made for where they are not (https://developer.nvidia.com/cuda-gpus)."""

from __future__ import annotations

import difflib
import re

from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.errors import EngineError

_ARCHITECTURES: dict[tuple[int, int], tuple[str, ...]] = {
    (7, 5): ("T4",),
    (8, 0): ("A100", "A30"),
    (8, 6): ("A10", "A10G", "A40", "RTX3090"),
    (8, 9): ("L4", "L40", "L40S", "RTX4090"),
    (9, 0): ("H100", "H200", "H20", "GH200"),
    (10, 0): ("B200", "GB200"),
    (10, 3): ("B300", "GB300"),
    (12, 0): ("RTX5090", "RTXPRO6000"),
}
GPU_MODELS = {name: capability for capability, names in _ARCHITECTURES.items() for name in names}
"""Compute capabilities by name."""

_MOST = 1024
_WANTED = re.compile(r"(?:(?P<count>\d+)x)?(?P<name>[\w-]+?)(?:[:x](?P<after>\d+))?", re.IGNORECASE)


def gpus_named(text: str) -> tuple[Gpu, ...]:
    """The GPUs of `h100`, `h100:8` or `8xh100`. Raises EngineError for a name that is not in the table."""
    match = _WANTED.fullmatch(text.strip())
    name = "" if match is None else re.sub(r"[-_]|nvidia", "", match["name"].lower()).upper()
    if match is None or name not in GPU_MODELS:
        near = difflib.get_close_matches(name, GPU_MODELS, n=1)
        advice = f"did you mean {near[0].lower()}?" if near else f"known are {', '.join(GPU_MODELS).lower()}"
        raise EngineError(f"--gpu {text}: expected a GPU and how many of them, as h100:8; {advice}")
    count = int(match["count"] or match["after"] or 1)
    if not 0 < count <= _MOST:
        raise EngineError(f"--gpu {text}: expected a number of GPUs from 1 to {_MOST}")
    return (Gpu(f"NVIDIA {name}", GPU_MODELS[name]),) * count
