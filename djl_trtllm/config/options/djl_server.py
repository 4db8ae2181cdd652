"""Keys of DJL Serving's HTTP front end."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.option import Option, Scope
from djl_trtllm.config.options.documents import DJL
from djl_trtllm.config.options.group import OptionGroup


class DjlServerOptions(OptionGroup):
    """Accepted as they are; `effect` says what each does here."""

    chunked_read_timeout: Annotated[
        int | None,
        Option(
            "chunked_read_timeout",
            "Longest wait of DJL Serving's front end for the next chunk of a stream.",
            unit="seconds",
            at_least=1,
            example="120",
            effect="no effect: a stream ends with its request, see option.predict_timeout",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
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
            effect="models may be registered from this folder (POST /models); the environment's word only",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    management_address: Annotated[
        str | None,
        Option(
            "management_address",
            "Address of DJL Serving's management API.",
            example="http://127.0.0.1:8081",
            effect="no effect: models are managed on the port of the requests",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    cluster_address: Annotated[
        str | None,
        Option(
            "cluster_address",
            "Address on which machines of a cluster talk to each other.",
            example="http://0.0.0.0:8888",
            effect="no effect: a model runs on one machine",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    model_url_pattern: Annotated[
        str | None,
        Option(
            "model_url_pattern",
            "Addresses models may be loaded from, as a regular expression.",
            example=".*",
            effect="no effect: the model is named when the server starts, and never by a request",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    wait_model_loading: Annotated[
        bool,
        Option(
            "wait_model_loading",
            "Load the models before listening.",
            effect="no effect: the server listens at once, and /ping says when the model is ready",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = True
    allow_multi_status: Annotated[
        bool,
        Option(
            "allow_multi_status",
            "Let /ping answer 207 where some models are not ready.",
            effect="no effect: there is one model",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = False
    number_of_netty_threads: Annotated[
        int,
        Option(
            "number_of_netty_threads",
            "Threads of the Java front end.",
            unit="threads",
            at_least=0,
            effect="no effect: there is no Java front end",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = 0
    use_native_io: Annotated[
        bool,
        Option(
            "use_native_io",
            "Use the system's own I/O in the Java front end.",
            effect="no effect: there is no Java front end",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = True
    io_ratio: Annotated[
        int,
        Option(
            "io_ratio",
            "Share of time the Java front end gives to I/O.",
            unit="percent",
            at_least=1,
            at_most=100,
            effect="no effect: there is no Java front end",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = 50
    cors_allowed_origin: Annotated[
        str | None,
        Option(
            "cors_allowed_origin",
            "Origins browsers may call from.",
            example="*",
            effect="no effect: put a proxy that answers browsers in front of the server",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    cors_allowed_methods: Annotated[
        str | None,
        Option(
            "cors_allowed_methods",
            "Methods browsers may call.",
            example="GET, POST",
            effect="no effect: put a proxy that answers browsers in front of the server",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    cors_allowed_headers: Annotated[
        str | None,
        Option(
            "cors_allowed_headers",
            "Headers browsers may send.",
            example="Content-Type",
            effect="no effect: put a proxy that answers browsers in front of the server",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    keystore: Annotated[
        str | None,
        Option(
            "keystore",
            "File with the key for TLS.",
            example="/etc/keystore.p12",
            effect="no effect: this server does not speak TLS, put a proxy in front of it",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    keystore_pass: Annotated[
        str | None,
        Option(
            "keystore_pass",
            "Password of the key file.",
            example="SECRET",
            effect="no effect: this server does not speak TLS, put a proxy in front of it",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    keystore_type: Annotated[
        str | None,
        Option(
            "keystore_type",
            "Format of the key file.",
            example="PKCS12",
            effect="no effect: this server does not speak TLS, put a proxy in front of it",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    certificate_file: Annotated[
        str | None,
        Option(
            "certificate_file",
            "Certificate for TLS.",
            example="/etc/certificate.pem",
            effect="no effect: this server does not speak TLS, put a proxy in front of it",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    private_key_file: Annotated[
        str | None,
        Option(
            "private_key_file",
            "Private key for TLS.",
            example="/etc/key.pem",
            effect="no effect: this server does not speak TLS, put a proxy in front of it",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    plugin_folder: Annotated[
        str | None,
        Option(
            "plugin_folder",
            "Folder of plugins of the Java front end.",
            example="/opt/djl/plugins",
            effect="no effect: there is no Java front end",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    error_rate_wlm: Annotated[
        str | None,
        Option(
            "error_rate_wlm",
            "Rate of refused requests above which /ping fails, such as `10/1m`.",
            example="10/1m",
            effect="no effect: /ping fails when the model has failed",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    error_rate_server: Annotated[
        str | None,
        Option(
            "error_rate_server",
            "Rate of errors of the server above which /ping fails, such as `10/1m`.",
            example="10/1m",
            effect="no effect: /ping fails when the model has failed",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    error_rate_model: Annotated[
        str | None,
        Option(
            "error_rate_model",
            "Rate of errors of the model above which /ping fails, such as `10/1m`.",
            example="10/1m",
            effect="no effect: /ping fails when the model has failed",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    error_rate_any: Annotated[
        str | None,
        Option(
            "error_rate_any",
            "Rate of errors of any kind above which /ping fails, such as `10/1m`.",
            example="10/1m",
            effect="no effect: /ping fails when the model has failed",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    health_check_override: Annotated[
        bool,
        Option(
            "health_check_override",
            "Answer /ping with 200 whatever the state of the model.",
            effect="no effect: /ping tells the truth",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = False
    prometheus: Annotated[
        bool,
        Option(
            "prometheus",
            "Open the metrics endpoint (SERVING_PROMETHEUS).",
            effect="no effect: /metrics is always open",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = False
    opts: Annotated[
        str | None,
        Option(
            "opts",
            "Options of the Java virtual machine (SERVING_OPTS).",
            example="-Dai.djl.logging.level=debug",
            effect="no effect: this server runs no Java",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
