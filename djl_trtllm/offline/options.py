"""A model with options that a program gives."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from djl_trtllm.config import Origin
from djl_trtllm.config.options.registry import find
from djl_trtllm.config.sources.keywords import as_arguments
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.offline.configurations import flattened
from djl_trtllm.service import Model, open_remote, open_source, prepare

_NO_DEADLINE = Origin.derived("an offline batch: no client waits for a single answer")


def open_offline_model(model: str | Path, options: Mapping[str, Any]) -> Model:
    """The model that `model` names, prepared to be run: fetched and compiled, if it has to be.

    It is a directory, an archive, a model of the hub or one in S3.

    `options` win over every other source; None means not given. `option.predict_timeout` applies only if it is one
    of them: it is a bound on what a client waits, and in a batch requests wait for each other.
    Raises ConfigError, also for what is no option, and DjlTrtllmError.
    """
    given = flattened(options)
    arguments = as_arguments(given, _configuration)
    if isinstance(model, str) and is_remote(model):
        source = open_remote(model, os.environ, arguments)
    else:
        source = open_source(Path(model), os.environ, arguments)
    prepared = prepare(source)
    if given.get("predict_timeout") is not None:
        return prepared
    return replace(prepared, config=prepared.config.replace(_NO_DEADLINE, predict_timeout=math.inf))


def _configuration(name: str) -> str | None:
    if not name.endswith("_config") or find(f"option.{name}"):
        return None
    return (
        f"{name} is not one of TensorRT-LLM's configuration objects that have options here; docs/offline.md lists them"
    )
