"""Model directories for DJL."""

from __future__ import annotations

from pathlib import Path

from serving_process import scripted_model

MODES = ("rolling", "async")
_OPTIONS = {
    "rolling": {"option.entryPoint": "djl_trtllm.handler", "option.rolling_batch": "auto"},
    "async": {
        "option.entryPoint": "djl_trtllm.async_handler",
        "option.async_mode": "true",
        "option.rolling_batch": "disable",
    },
}


def djl_model(directory: Path, mode: str, script: dict[str, object] | None = None, **options: object) -> Path:
    """The scripted model behind one of our handlers. One worker, as one engine has one process; retries, because DJL
    otherwise gives a model up at its first crash."""
    common = {"engine": "Python", "minWorkers": 1, "maxWorkers": 1, "retry_threshold": 10}
    return scripted_model(directory, script, **{**common, **_OPTIONS[mode], **options})
