"""`create_app`: the server as an ASGI application, for any ASGI server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from djl_trtllm.config.sources.keywords import as_arguments
from djl_trtllm.server.application import Application
from djl_trtllm.server.startup import plan_startup


def create_app(
    model: str | Path | None = None, options: Mapping[str, Any] | None = None, *, wait_until_ready: bool = False
) -> Application:
    """An ASGI application that serves a model, to be run by uvicorn, mounted in a program or deployed with Ray Serve.

    `model` is what `djl-trtllm serve` takes: a directory, an archive, a model of the hub or in S3. Without one, the
    environment names it, as for `serve` (`HF_MODEL_ID`, `SERVING_LOAD_MODELS`, `SERVING_MODEL_STORE`, ...). `options`
    are options of docs/options.md, with or without `option.`, of the server as well as of its models; they win over
    serving.properties and the environment.

    The model is loaded in the application's lifespan, in the background while /ping returns 503, or, with
    `wait_until_ready`, before the lifespan's start is complete. At the lifespan's end running requests get
    `shutdown_timeout` seconds.

    The ASGI server bounds connections and has their addresses, ports and certificates; options about them have no
    effect here, and there is no gRPC. docs/asgi.md says what else depends on it. A process should have one application.

    Raises ConfigError, also for what is no option, and DjlTrtllmError if there is no such model.
    """
    arguments = as_arguments(options or {})
    named = None if model is None else str(model)
    return Application(*plan_startup(named, os.environ, arguments), wait_until_ready=wait_until_ready)
