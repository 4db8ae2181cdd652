"""TensorRT-LLM model handler for DJL Serving and SageMaker."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from djl_trtllm.version import __version__ as __version__

if TYPE_CHECKING:
    from djl_trtllm.offline import *  # noqa: F403  # its __all__ is the public API
    from djl_trtllm.server.application import create_app as create_app


def __getattr__(name: str) -> Any:
    """Import a name of the API on its first use: every command imports this package, and few need the API's modules."""
    if name == "create_app":
        return import_module("djl_trtllm.server.application").create_app
    if name == "__all__" or name[:1].isupper():  # classes of the offline API; names of modules are looked up here too
        offline = import_module("djl_trtllm.offline")
        if name == "__all__":
            return [*offline.__all__, "__version__", "create_app"]
        if name in offline.__all__:
            return getattr(offline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
