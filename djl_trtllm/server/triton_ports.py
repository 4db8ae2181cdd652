"""What a server of a Triton repository has besides: the port of its gRPC API, and its table of models."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from djl_trtllm.config.compat.triton import repository_files
from djl_trtllm.server.context import ServerContext

if TYPE_CHECKING:
    from djl_trtllm.server.triton_grpc import TritonGrpcServer

logger = logging.getLogger(__name__)

_VERSION = "1"


async def listen_grpc(context: ServerContext) -> TritonGrpcServer | None:
    """Listen on the port of Triton's gRPC API, if there is one and grpcio. Raises ConfigError if it is in use."""
    options = context.options
    if not options.triton_grpc_port:
        return None
    if importlib.util.find_spec("grpc") is None:
        logger.warning(
            "triton_grpc_port=%d is not served: grpcio is not installed, so there is HTTP only; "
            "pip install 'djl-trtllm[grpc]', or set SERVING_TRITON_GRPC_PORT=0",
            options.triton_grpc_port,
        )
        return None
    # gRPC's library writes to standard error itself, beside the log; every program that is started makes it say so.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from djl_trtllm.server.triton_grpc import TritonGrpcServer

    server = TritonGrpcServer(context, options.triton_grpc_port)
    await server.start()
    logger.info("listening on %s:%d for gRPC (triton_grpc_port)", options.host, server.bound_port)
    return server


def ready_table(directory: Path) -> str:
    """The models of a Triton repository as Triton prints them; "" for any other directory."""
    files = repository_files(directory)
    return _table(sorted(path.parent.name for path in files)) if len(files) > 1 else ""


def _table(names: Sequence[str]) -> str:
    rows = [("Model", "Version", "Status"), *((name, _VERSION, "READY") for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([line, shown[0], line, *shown[1:], line])
