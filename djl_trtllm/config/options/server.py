"""The server process: addresses, sizes, status codes, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from djl_trtllm.config.options.documents import DJL, OURS
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option, Scope


class ServerOptions(OptionGroup):
    """Options of the process rather than of a model."""

    inference_address: Annotated[
        str | None,
        Option(
            "inference_address",
            "Address the server listens on, as `http://HOST:PORT`.",
            example="http://0.0.0.0:8080",
            default_note="http://0.0.0.0:8080",
            effect="gives inference_host and inference_port where these are not set themselves",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    host: Annotated[
        str,
        Option(
            "inference_host",
            "Network address the server listens on; 0.0.0.0 is every interface.",
            effect="listening address",
            source=OURS,
            scope=Scope.SERVER,
        ),
    ] = "0.0.0.0"  # noqa: S104  (a container has to be reachable; DJL Serving's containers listen so too)
    port: Annotated[
        int,
        Option(
            "inference_port",
            "Port the server listens on; 0 takes a free one.",
            at_least=0,
            at_most=65535,
            effect="listening port",
            source=OURS,
            scope=Scope.SERVER,
        ),
    ] = 8080
    max_request_size: Annotated[
        int,
        Option(
            "max_request_size",
            "Largest request body; a larger one is refused before it is read.",
            unit="bytes",
            at_least=1,
            effect="bound of request bodies",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = 67108864
    bad_request_http_code: Annotated[
        int,
        Option(
            "bad_request_http_code",
            "Status of a malformed request.",
            unit="HTTP status",
            at_least=400,
            at_most=599,
            effect="response status",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = 400
    wlm_error_http_code: Annotated[
        int,
        Option(
            "wlm_error_http_code",
            "Status when the model cannot take requests: it loads, recovers, drains or has failed.",
            unit="HTTP status",
            at_least=400,
            at_most=599,
            effect="response status",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = 503
    throttle_error_http_code: Annotated[
        int,
        Option(
            "throttle_error_http_code",
            "Status when the waiting queue is full.",
            unit="HTTP status",
            at_least=400,
            at_most=599,
            effect="response status",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = 503
    timeout_http_code: Annotated[
        int,
        Option(
            "timeout_http_code",
            "Status of a request that did not finish within `option.predict_timeout`.",
            unit="HTTP status",
            at_least=400,
            at_most=599,
            effect="response status",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = 400
    server_error_http_code: Annotated[
        int,
        Option(
            "server_error_http_code",
            "Status of an error inside the server.",
            unit="HTTP status",
            at_least=400,
            at_most=599,
            effect="response status",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = 500
    request_id_header_key: Annotated[
        str,
        Option(
            "request_id_header_key",
            "Header with the id of a request, read from requests and written to responses and logs. SageMaker's own "
            "is X-Amzn-SageMaker-Inference-Id.",
            effect="name of the header",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = "x-request-id"
    shutdown_timeout: Annotated[
        float,
        Option(
            "shutdown_timeout",
            "Time for running requests to finish after SIGTERM. SageMaker kills the container 30 seconds after the "
            "signal, so the default stays below that.",
            unit="seconds",
            at_least=0,
            effect="longest drain",
            source=OURS,
            scope=Scope.SERVER,
        ),
    ] = 25.0
    fail_fast: Annotated[
        bool,
        Option(
            "fail_fast",
            "End the process with a non-zero status when the model has failed for good, so that whatever supervises "
            "it starts a new one.",
            effect="the process ends when the model has failed",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = False
    install_requirements: Annotated[
        bool,
        Option(
            "install_requirements",
            "Install the `requirements.txt` of a model directory before the model is loaded. It runs code the model "
            "brings along, so only the operator can allow it: by the environment variable "
            "SERVING_INSTALL_REQUIREMENTS, never from inside a model directory.",
            aliases=("option.install_requirements",),
            effect="pip install of the model's requirements.txt",
            source=f"{DJL}, which always installs them",
            scope=Scope.OPERATOR,
        ),
    ] = False
    cache_dir: Annotated[
        Path | None,
        Option(
            "cache_dir",
            "DJL Serving's cache folder (DJL_CACHE_DIR); compiled engines go into its djl-trtllm folder.",
            example="/var/cache/djl",
            effect="default of option.engine_cache_dir",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    download_dir: Annotated[
        Path | None,
        Option(
            "download_dir",
            "Folder into which models are downloaded (SERVING_DOWNLOAD_DIR).",
            example="/var/cache/models",
            default_note="the caches of the libraries that download",
            effect="folder of downloads; default of option.engine_cache_dir where DJL_CACHE_DIR is not set",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
