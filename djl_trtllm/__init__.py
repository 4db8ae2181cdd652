"""TensorRT-LLM model handler for DJL Serving and SageMaker."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from djl_trtllm.version import __version__ as __version__

if TYPE_CHECKING:
    from djl_trtllm.offline import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """The offline API on first use: every command imports this package, and few need what stands behind the API."""
    if name == "__all__" or name[:1].isupper():  # the API has only classes; names of modules are looked up here too
        offline = import_module("djl_trtllm.offline")
        if name == "__all__":
            return [*offline.__all__, "__version__"]
        if name in offline.__all__:
            return getattr(offline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
