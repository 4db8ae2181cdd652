"""What only Triton's API and its model repositories have."""

from __future__ import annotations

from typing import Any

from djl_trtllm.config.options.documents import TRITON
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Scope, option


def _port(key: str, description: str, effect: str) -> Any:
    return option(
        0,
        description,
        key=key,
        at_least=0,
        at_most=65535,
        effect=effect,
        source=TRITON,
        scope=Scope.SERVER,
    )


class TritonOptions(OptionGroup):
    """Options of Triton's dialect; other dialects do not read them."""

    decoupled: bool | None = option(
        None,
        "Whether Triton's API streams: with `false` it refuses requests for streams, as Triton does. Other APIs stream "
        "in any case.",
        aliases=("option.decoupled_mode",),
        example="true",
        default_note="true",
        effect="streams of Triton's API",
        source=TRITON,
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
