"""The server process: addresses, sizes, status codes, folders."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.config.options.documents import DJL, OURS
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Scope, option


class ServerOptions(OptionGroup):
    """Options of the process rather than of a model."""

    inference_address: str | None = option(
        None,
        "Address the server listens on, as `http://HOST:PORT`.",
        key="inference_address",
        example="http://0.0.0.0:8080",
        default_note="http://0.0.0.0:8080",
        effect="gives inference_host and inference_port where these are not set themselves",
        source=DJL,
        scope=Scope.SERVER,
    )
    host: str = option(
        "0.0.0.0",  # noqa: S104
        "Network address the server listens on; 0.0.0.0 is every interface.",
        key="inference_host",
        effect="listening address",
        source=OURS,
        scope=Scope.SERVER,
    )
    port: int = option(
        8080,
        "Port the server listens on; 0 takes a free one.",
        key="inference_port",
        at_least=0,
        at_most=65535,
        effect="listening port",
        source=OURS,
        scope=Scope.SERVER,
    )
    max_request_size: int = option(
        6291456,
        "Largest request body; a larger one is refused before it is read. The default is the largest that SageMaker "
        "sends to an endpoint (DJL Serving has 64 MiB). Reading the JSON of a larger one can delay all other requests "
        "by tens of milliseconds.",
        key="max_request_size",
        unit="bytes",
        at_least=1,
        effect="bound of request bodies",
        source=DJL,
        scope=Scope.SERVER,
    )
    bad_request_http_code: int = option(
        400,
        "Status of a malformed request.",
        key="bad_request_http_code",
        unit="HTTP status",
        at_least=400,
        at_most=599,
        effect="response status",
        source=DJL,
        scope=Scope.SERVER,
    )
    wlm_error_http_code: int = option(
        503,
        "Status when the model cannot take requests: it loads, recovers, drains or has failed.",
        key="wlm_error_http_code",
        unit="HTTP status",
        at_least=400,
        at_most=599,
        effect="response status",
        source=DJL,
        scope=Scope.SERVER,
    )
    throttle_error_http_code: int = option(
        503,
        "Status when the waiting queue is full.",
        key="throttle_error_http_code",
        unit="HTTP status",
        at_least=400,
        at_most=599,
        effect="response status",
        source=DJL,
        scope=Scope.SERVER,
    )
    timeout_http_code: int = option(
        400,
        "Status of a request that did not finish within `option.predict_timeout`.",
        key="timeout_http_code",
        unit="HTTP status",
        at_least=400,
        at_most=599,
        effect="response status",
        source=DJL,
        scope=Scope.SERVER,
    )
    server_error_http_code: int = option(
        500,
        "Status of an error inside the server.",
        key="server_error_http_code",
        unit="HTTP status",
        at_least=400,
        at_most=599,
        effect="response status",
        source=DJL,
        scope=Scope.SERVER,
    )
    request_id_header_key: str = option(
        "x-request-id",
        "Header with the id of a request, read from requests and written to responses and logs. SageMaker's own "
        "is X-Amzn-SageMaker-Inference-Id.",
        key="request_id_header_key",
        effect="name of the header",
        source=DJL,
        scope=Scope.SERVER,
    )
    monitor: bool | None = option(
        None,
        "Whether `/monitor` is there, the live page of requests, batch and latencies (docs/monitor.md). It has no text "
        "of requests. With API keys its numbers need one with the role `metrics`.",
        key="monitor",
        example="true",
        default_note="for browsers on this machine only, at a loopback address",
        effect="the live page",
        source=OURS,
        scope=Scope.SERVER,
    )
    shutdown_timeout: float = option(
        25.0,
        "Time for running requests to finish after SIGTERM. SageMaker kills the container 30 seconds after the "
        "signal, so the default stays below that.",
        key="shutdown_timeout",
        unit="seconds",
        at_least=0,
        effect="longest drain",
        source=OURS,
        scope=Scope.SERVER,
    )
    fail_fast: bool = option(
        False,
        "End the process with a non-zero status when the model has failed for good, so that whatever supervises "
        "it starts a new one.",
        key="fail_fast",
        effect="the process ends when the model has failed",
        source=DJL,
        scope=Scope.SERVER,
    )
    install_requirements: bool = option(
        False,
        "Install the `requirements.txt` of a model directory before the model is loaded. It runs code the model "
        "brings along, so only the operator can allow it: by the environment variable "
        "SERVING_INSTALL_REQUIREMENTS, never from inside a model directory.",
        key="install_requirements",
        aliases=("option.install_requirements",),
        effect="pip install of the model's requirements.txt",
        source=f"{DJL}, which always installs them",
        scope=Scope.OPERATOR,
    )
    adapter_roots: tuple[str, ...] | None = option(
        None,
        "Folders from which LoRA adapters may be registered, besides the model's own `adapters`. Only the operator "
        "names them, by SERVING_ADAPTER_ROOTS.",
        key="adapter_roots",
        example="/opt/ml/adapters,/mnt/adapters",
        default_note="/opt/ml if a SAGEMAKER_* variable is set, else none",
        effect="folders of adapters that requests may register",
        source=OURS,
        scope=Scope.OPERATOR,
    )
    cache_dir: Path | None = option(
        None,
        "DJL Serving's cache folder (DJL_CACHE_DIR); compiled engines go into its djl-trtllm folder.",
        key="cache_dir",
        example="/var/cache/djl",
        effect="default of option.engine_cache_dir",
        source=DJL,
        scope=Scope.SERVER,
    )
    download_dir: Path | None = option(
        None,
        "Folder into which models are downloaded (SERVING_DOWNLOAD_DIR).",
        key="download_dir",
        example="/var/cache/models",
        default_note="the caches of the libraries that download",
        effect="folder of downloads; default of option.engine_cache_dir where DJL_CACHE_DIR is not set",
        source=DJL,
        scope=Scope.SERVER,
    )
