"""Keys of DJL Serving's HTTP front end."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.options.documents import DJL
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option, Scope


class DjlServerOptions(OptionGroup):
    """The ones that have an effect here."""

    features: Annotated[
        str | None,
        Option(
            "features",
            "SERVING_FEATURES, the libraries of DJL Serving's container (`trtllm`, `vllm`).",
            example="trtllm",
            effect="says how CUDA_MEMORY_FRACTION is meant; no other effect",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    load_models: Annotated[
        str | None,
        Option(
            "load_models",
            "Models that are loaded when the server starts.",
            example="ALL",
            effect="which models of model_store the server is started with: ALL, NONE or names; without it none",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    model_store: Annotated[
        str | None,
        Option(
            "model_store",
            "Folder of models.",
            example="/opt/ml/model",
            effect="models may be registered from this folder (POST /models); set in the environment only",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
