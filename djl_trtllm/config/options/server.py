"""The server process: addresses, connections, access, clients, logs, and other servers' keys that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from djl_trtllm.config.options.choices import LogFormat, LogLevel, SchedulingPolicy
from djl_trtllm.config.options.option import DJL, OURS, TRITON, OptionGroup, Scope, amount, count, option, unset


def _status(default: int, description: str) -> Any:
    return option(default, description, unit="HTTP status", at_least=400, at_most=599, effect="response status")


class ServerOptions(
    OptionGroup, name="server", heading="The server process", prefix="", scope=Scope.SERVER, source=DJL
):
    """Options of the process rather than of a model."""

    inference_address: str | None = unset(
        "Address the server listens on, as `http://HOST:PORT`.",
        example="http://0.0.0.0:8080",
        default_note="http://0.0.0.0:8080",
        effect="gives inference_host and inference_port where these are not set themselves",
    )
    host: str = option(
        "0.0.0.0",  # noqa: S104
        "Network address the server listens on; 0.0.0.0 is every interface.",
        key="inference_host",
        effect="listening address",
        source=OURS,
    )
    port: int = option(
        8080,
        "Port the server listens on; 0 takes a free one.",
        key="inference_port",
        at_least=0,
        at_most=65535,
        effect="listening port",
        source=OURS,
    )
    max_request_size: int = option(
        6291456,
        "Largest request body; a larger one is refused before it is read. The default is the largest that SageMaker "
        "sends to an endpoint (DJL Serving has 64 MiB). Reading the JSON of a larger one can delay all other requests "
        "by tens of milliseconds.",
        **count("bytes"),
        effect="bound of request bodies",
    )
    bad_request_http_code: int = _status(400, "Status of a malformed request.")
    wlm_error_http_code: int = _status(
        503, "Status when the model cannot take requests: it loads, recovers, drains or has failed."
    )
    throttle_error_http_code: int = _status(503, "Status when the waiting queue is full.")
    timeout_http_code: int = _status(400, "Status of a request that did not finish within `option.predict_timeout`.")
    server_error_http_code: int = _status(500, "Status of an error inside the server.")
    request_id_header_key: str = option(
        "x-request-id",
        "Header with the id of a request, read from requests and written to responses and logs. SageMaker's own "
        "is X-Amzn-SageMaker-Inference-Id.",
        effect="name of the header",
    )
    monitor: bool | None = unset(
        "Whether `/monitor` is there, the live page of requests, batch and latencies (docs/monitor.md). It has no text "
        "of requests. With API keys its numbers need one with the role `metrics`; without them, `true` shows them to "
        "everybody.",
        example="true",
        default_note="for the person who starts the server on a terminal, which shows a link with a key",
        effect="the live page",
        source=OURS,
    )
    shutdown_timeout: float = option(
        25.0,
        "Time for running requests to finish after SIGTERM. SageMaker kills the container 30 seconds after the "
        "signal, so the default stays below that.",
        unit="seconds",
        at_least=0,
        effect="longest drain",
        source=OURS,
    )
    fail_fast: bool = option(
        False,
        "End the process with a non-zero status when the model has failed for good, so that whatever supervises "
        "it starts a new one.",
        effect="the process ends when the model has failed",
    )
    install_requirements: bool = option(
        False,
        "Install the `requirements.txt` of a model directory before the model is loaded. It runs code the model "
        "brings along, so only the operator can allow it: by the environment variable "
        "SERVING_INSTALL_REQUIREMENTS, never from inside a model directory.",
        aliases=("option.install_requirements",),
        effect="pip install of the model's requirements.txt",
        source=f"{DJL}, which always installs them",
        scope=Scope.OPERATOR,
    )
    adapter_roots: tuple[str, ...] | None = unset(
        "Folders from which LoRA adapters may be registered, besides the model's own `adapters`. Only the operator "
        "names them, by SERVING_ADAPTER_ROOTS.",
        example="/opt/ml/adapters,/mnt/adapters",
        default_note="/opt/ml if a SAGEMAKER_* variable is set, else none",
        effect="folders of adapters that requests may register",
        source=OURS,
        scope=Scope.OPERATOR,
    )
    cache_dir: Path | None = unset(
        "DJL Serving's cache folder (DJL_CACHE_DIR); compiled engines go into its djl-trtllm folder.",
        example="/var/cache/djl",
        effect="default of option.engine_cache_dir",
    )
    download_dir: Path | None = unset(
        "Folder into which models are downloaded (SERVING_DOWNLOAD_DIR).",
        example="/var/cache/models",
        default_note="the caches of the libraries that download",
        effect="folder of downloads; default of option.engine_cache_dir where DJL_CACHE_DIR is not set",
    )


class ConnectionOptions(
    OptionGroup, name="connections", heading="Connections", prefix="", scope=Scope.SERVER, source=OURS
):
    """Limits that hold before a request is understood."""

    max_connections: int = option(
        16384,
        "Connections that may be open at once. One more closes the one that is idle longest; if none is idle, it is "
        "answered with 503, except for health checks. Less where the limit of file descriptors (`ulimit -Hn`) does "
        "not suffice; the log says so.",
        **count("connections"),
        effect="bound of open connections",
    )
    max_header_size: int = option(
        32768,
        "Largest head of a request: request line and headers. More is refused with 431. Trailers, and what a chunked "
        "body has besides its content, may be as large.",
        unit="bytes",
        at_least=1024,
        effect="bound of everything in a request that is not its body",
    )
    max_header_count: int = option(
        100,
        "Headers that a request may have, trailers included. More are refused with 431.",
        **count("headers"),
        effect="bound of the number of headers",
    )
    max_url_size: int = option(
        8192,
        "Longest address in a request line, with its query. A longer one is refused with 414.",
        unit="bytes",
        at_least=128,
        effect="bound of the address of a request",
    )
    max_body_memory: int = option(
        134217728,
        "Memory for the request bodies that are being read and parsed, of all requests together. A body is refused "
        "with 503 when it needs more than the others leave free after it, so that small requests always find a "
        "place; a single one may have half of this.",
        unit="bytes",
        at_least=65536,
        effect="bound of all request bodies in memory",
    )
    header_read_timeout: float = option(
        30.0,
        "Time from the first byte of a request to the end of its headers. Then it is answered with 408.",
        **amount("seconds"),
        effect="deadline of reading headers",
    )
    body_read_timeout: float = option(
        60.0,
        "Time for reading the body of a request, and a second more for every 16 KiB of it that have come. Then it is "
        "answered with 408.",
        **amount("seconds"),
        effect="deadline of reading a body",
    )
    keep_alive_timeout: float = option(
        75.0,
        "Time that a connection may be open without a request. Keep it above that of a load balancer in front (60 "
        "seconds on AWS), or the balancer uses connections that are just being closed.",
        **amount("seconds"),
        effect="longest idle time of a connection",
    )
    websocket_idle_timeout: float = option(
        600.0,
        "Time that a WebSocket may be open without a message of its client, while nothing is generated for it. Then it "
        "is closed with 1001.",
        **amount("seconds"),
        effect="longest idle time of a WebSocket",
    )


PROTECTING = ("api_key", "api_keys_file", "certificate_file", "private_key_file", "client_ca_file")
"""Options that must not be empty: `SERVING_API_KEY=$KEY` without a KEY would leave the server open."""


class AccessOptions(
    OptionGroup,
    name="access",
    heading="API keys, TLS and the management API",
    prefix="",
    scope=Scope.OPERATOR,
    source=OURS,
):
    """Options of the operator: no file of a model sets keys or certificates."""

    api_key: str | None = unset(
        "A key that requests must have, as `Authorization: Bearer KEY` or `x-api-key: KEY`. It may do everything: "
        "generate, manage models and adapters, read metrics. /ping and the health pages need no key.",
        example="SECRET",
        effect="requests without it get 401",
    )
    api_keys_file: Path | None = unset(
        "A YAML file with further keys and what each may do (docs/access.md).",
        example="/etc/djl-trtllm/keys.yaml",
        effect="requests need one of its keys, with the role for what they ask",
    )
    cors_allowed_origin: tuple[str, ...] | None = unset(
        "Origins of web pages that may use the server from browsers, such as `https://chat.example.com`; `*` for all. "
        "Without API keys, a connection to a loopback address may only come from pages of this machine and of these "
        "origins, and name this machine or one of them as its `Host`.",
        example="https://chat.example.com,http://localhost:3000",
        effect="browsers let these pages read responses (CORS)",
        source=DJL,
    )
    management_address: str | None = unset(
        "Address of the management API, as `http://HOST:PORT`.",
        example="http://127.0.0.1:8081",
        default_note="that of the requests",
        effect="gives management_host and management_port where these are not set themselves",
        source=DJL,
        scope=Scope.SERVER,
    )
    management_host: str = option(
        "127.0.0.1",
        "Network address of the management API, if it has a port of its own.",
        effect="listening address of management_port",
        scope=Scope.SERVER,
    )
    management_port: int = option(
        0,
        "Port of the management API: models and adapters. It is then not on the port of the requests, nor are they on "
        "it; health pages and metrics are on both. 0: it is on the port of the requests.",
        at_least=0,
        at_most=65535,
        effect="listening port of the management API",
        scope=Scope.SERVER,
    )
    certificate_file: Path | None = unset(
        "Certificate for TLS with its chain, in PEM. With `private_key_file` all ports speak TLS.",
        example="/etc/djl-trtllm/certificate.pem",
        effect="HTTPS in the place of HTTP",
        source=DJL,
    )
    private_key_file: Path | None = unset(
        "Private key of `certificate_file`, in PEM, without a password.",
        example="/etc/djl-trtllm/key.pem",
        effect="HTTPS in the place of HTTP",
        source=DJL,
    )
    client_ca_file: Path | None = unset(
        "Certificates, in PEM, of the authorities that sign clients' certificates. Clients must then have one.",
        example="/etc/djl-trtllm/clients.pem",
        effect="connections without a certificate from them are refused",
    )


class ClientOptions(
    OptionGroup, name="clients", heading="Fairness among clients", prefix="", scope=Scope.SERVER, source=OURS
):
    """Options of the operator, who knows what is in front of the server."""

    scheduling_policy: SchedulingPolicy = option(
        SchedulingPolicy.FAIR,
        "Order of waiting requests. `fair`: clients get equal shares of the tokens, and each client's requests run in "
        "the order in which they came. `fcfs`: first come, first served, over all clients.",
        effect="order of the waiting queue",
        source="vLLM's name",
    )
    client_header: str | None = unset(
        "Header that names the client of a request, where requests have no API key of their own. Clients can write "
        "what they like into it: let a gateway set it. Without it, or without the header, a client is an address.",
        example="x-user-id",
        effect="client of a request",
    )
    priority_header: str | None = unset(
        "Header with the priority of a request: `high`, `normal` or `low`. Requests with a higher one go first. "
        "Without this option no request has a priority.",
        example="x-priority",
        effect="priority of a request",
    )
    client_from_custom_attributes: bool = option(
        False,
        "Whether `client_header` and `priority_header` may also come as SageMaker's custom attributes "
        "(`X-Amzn-SageMaker-Custom-Attributes: x-user-id=ada`). For SageMaker, which passes no other header on. Behind "
        "another gateway a client could write there what the gateway removes from its headers.",
        effect="custom attributes name the client and the priority of a request",
    )
    max_requests_per_client: int = option(
        0,
        "Requests that a client may have at once, running and waiting. One more is refused with 429. 0: as many as "
        "there is room for.",
        unit="requests",
        at_least=0,
        effect="bound of a client's requests",
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        ("127.0.0.1", "::1"),
        "Addresses and networks of the proxies whose `X-Forwarded-For` is believed, `*` for any.",
        effect="address of a client behind a proxy",
        source="uvicorn",
    )


class TelemetryOptions(
    OptionGroup, name="telemetry", heading="Log and traces", prefix="", scope=Scope.SERVER, source=OURS
):
    """Options of the process (docs/logs-and-traces.md)."""

    log_format: LogFormat = option(
        LogFormat.TEXT,
        "Format of the log: lines of text, or a JSON object per line.",
        effect="format of the log; inside DJL Serving it is DJL's own",
    )
    log_level: LogLevel = option(
        LogLevel.INFO,
        "Least level of the lines in the log.",
        effect="level of the log; inside DJL Serving it is DJL's own",
    )
    request_log: bool = option(
        True,
        "Whether the log has a line for each request at its end, with its id, model, status, tokens and times, never "
        "with its text. Refusals are at most ten lines a second; the others are counted.",
        effect="a line in the log for each request",
    )
    otlp_traces_endpoint: str | None = unset(
        "Address to which traces are sent by OTLP. The environment variables of OpenTelemetry "
        "(`OTEL_EXPORTER_OTLP_ENDPOINT` and the others) do the same. It needs the packages of `djl-trtllm[otel]`.",
        example="http://localhost:4318/v1/traces",
        default_note="that of the OTEL_* variables, else no traces",
        effect="traces of requests",
        scope=Scope.OPERATOR,
    )


def _port(key: str, description: str, effect: str) -> Any:
    return option(0, description, key=key, at_least=0, at_most=65535, effect=effect, source=TRITON, scope=Scope.SERVER)


class TritonOptions(OptionGroup, name="triton", heading="Triton's API and model repositories", source=TRITON):
    """Options of Triton's dialect; other dialects do not read them."""

    decoupled: bool | None = unset(
        "Whether Triton's API streams: with `false` it refuses requests for streams, as Triton does. Other APIs stream "
        "in any case.",
        aliases=("option.decoupled_mode",),
        example="true",
        default_note="true",
        effect="streams of Triton's API",
    )
    triton_http_port: int = _port(
        "triton_http_port",
        "A further port of the server with Triton's number. A Triton repository with `ensemble` and the other models "
        "presets 8000; 0 is no further port.",
        "listening port with all routes, beside inference_port",
    )
    triton_grpc_port: int = _port(
        "triton_grpc_port",
        "The port of Triton's gRPC API. A Triton repository with `ensemble` and the other models presets 8001; 0 is no "
        "such port. It needs grpcio: `pip install 'djl-trtllm[grpc]'`.",
        "listening port of gRPC",
    )
    triton_metrics_port: int = _port(
        "triton_metrics_port",
        "A further port of the server, for `/metrics` where Triton has it. A Triton repository with `ensemble` and the "
        "other models presets 8002; 0 is no further port.",
        "listening port with all routes, beside inference_port",
    )


class DjlServerOptions(
    OptionGroup, name="djl_server", heading="DJL Serving's front end", prefix="", scope=Scope.SERVER, source=DJL
):
    """Keys of DJL Serving's front end that have an effect here."""

    features: str | None = unset(
        "SERVING_FEATURES, the libraries of DJL Serving's container (`trtllm`, `vllm`).",
        example="trtllm",
        effect="says how CUDA_MEMORY_FRACTION is meant; no other effect",
    )
    load_models: str | None = unset(
        "Models that are loaded when the server starts.",
        example="ALL",
        effect="which models of model_store the server is started with: ALL, NONE or names; without it none. "
        "SERVING_LOAD_MODELS=NAME::ENGINE=ADDRESS serves the model at ADDRESS as NAME, whatever ENGINE is",
    )
    model_store: str | None = unset(
        "Folder of models.",
        example="/opt/ml/model",
        effect="models may be registered from this folder (POST /models); set in the environment only",
    )
