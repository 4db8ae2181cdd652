"""The lifecycle of loaded models.

`open_source` and `prepare` turn what the user named into a `Model`. A `ModelService` runs it and takes its requests. A
server has a `Registry` of `ServedModel`s, each with one or more such services.
"""

from djl_trtllm.service.engine import settle_garbage_collector
from djl_trtllm.service.lifecycle import ModelService, Registry, ServedModel, State
from djl_trtllm.service.model import Model, Texts, open_remote, open_source, plan, prepare, prepare_apart, remote_name

__all__ = [
    "Model",
    "ModelService",
    "Registry",
    "ServedModel",
    "State",
    "Texts",
    "open_remote",
    "open_source",
    "plan",
    "prepare",
    "prepare_apart",
    "remote_name",
    "settle_garbage_collector",
]
