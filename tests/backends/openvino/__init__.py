"""OpenVINO's executor, as its tests load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
    "keeps_keys_apart": False,
    "kv_cache_precision": "f16",
    "inference_precision": "f32",
    "max_sequences": 8,
    "max_seq_len": 1024,
}


def executor_options(engine: Path, **options: object) -> dict[str, Any]:
    """Return the options of an executor of 8 sequences."""
    return {"engine_dir": str(engine), **OPTIONS, **options}
