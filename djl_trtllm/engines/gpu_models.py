"""The GPUs that a plan can be made for where they are not (`sizing/gpus.toml`)."""

from __future__ import annotations

import difflib
import re

from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.errors import EngineError
from djl_trtllm.sizing.gpus import GPUS

_SEPARATORS = re.compile(r"[-_]|nvidia", re.IGNORECASE)
_MODELS = {_SEPARATORS.sub("", name).upper(): gpu for gpu in GPUS.values() for name in (gpu.name, *gpu.aliases)}
_MOST = 1024
_WANTED = re.compile(r"(?:(?P<count>\d+)x)?(?P<name>[\w-]+?)(?:[:x](?P<after>\d+))?", re.IGNORECASE)


def gpus_named(text: str) -> tuple[Gpu, ...]:
    """The GPUs of `h100`, `h100:8` or `8xh100`. Raises EngineError for a name that is not in the table."""
    match = _WANTED.fullmatch(text.strip())
    model = None if match is None else _MODELS.get(_SEPARATORS.sub("", match["name"]).upper())
    if match is None or model is None:
        known = [name.lower() for name in GPUS]
        wanted = "" if match is None else match["name"].lower()
        near = difflib.get_close_matches(wanted, known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise EngineError(f"--gpu {text}: expected a GPU and how many of them, as h100:8; {advice}")
    count = int(match["count"] or match["after"] or 1)
    if not 0 < count <= _MOST:
        raise EngineError(f"--gpu {text}: expected a number of GPUs from 1 to {_MOST}")
    return (Gpu(f"NVIDIA {model.name}", model.compute_capability, model.memory),) * count
