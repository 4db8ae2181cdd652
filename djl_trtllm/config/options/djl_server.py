"""Keys of DJL Serving's HTTP front end."""

from __future__ import annotations

from djl_trtllm.config.options.documents import DJL
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Scope, option


class DjlServerOptions(OptionGroup):
    """The ones that have an effect here."""

    features: str | None = option(
        None,
        "SERVING_FEATURES, the libraries of DJL Serving's container (`trtllm`, `vllm`).",
        key="features",
        example="trtllm",
        effect="says how CUDA_MEMORY_FRACTION is meant; no other effect",
        source=DJL,
        scope=Scope.SERVER,
    )
    load_models: str | None = option(
        None,
        "Models that are loaded when the server starts.",
        key="load_models",
        example="ALL",
        effect="which models of model_store the server is started with: ALL, NONE or names; without it none. "
        "SERVING_LOAD_MODELS=NAME::ENGINE=ADDRESS serves the model at ADDRESS as NAME, whatever ENGINE is",
        source=DJL,
        scope=Scope.SERVER,
    )
    model_store: str | None = option(
        None,
        "Folder of models.",
        key="model_store",
        example="/opt/ml/model",
        effect="models may be registered from this folder (POST /models); set in the environment only",
        source=DJL,
        scope=Scope.SERVER,
    )
