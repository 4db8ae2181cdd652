"""One object per loaded model, from its files to its end.

`open_source` and `prepare` turn what the user named into a `Model`; a `ModelService` runs it and takes its requests.
"""

from djl_trtllm.service.garbage import settle_garbage_collector
from djl_trtllm.service.lifecycle import ModelService, State
from djl_trtllm.service.model import Model, Source, open_remote, open_source, plan, prepare, remote_name
from djl_trtllm.service.registry import Registry

__all__ = [
    "Model",
    "ModelService",
    "Registry",
    "Source",
    "State",
    "open_remote",
    "open_source",
    "plan",
    "prepare",
    "remote_name",
    "settle_garbage_collector",
]
