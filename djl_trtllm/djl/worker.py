"""The model of a DJL worker process, from the properties of DJL's first call to shutdown."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from djl_trtllm.api.headers import request_id
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.errors import DjlTrtllmError, ModelError
from djl_trtllm.logs import mark_lines
from djl_trtllm.service import Model, ModelService, open_source, prepare
from djl_trtllm.telemetry import ServedRequest

logger = logging.getLogger(__name__)

METRICS_SECONDS = 60.0
_MPI_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_")


def is_passive() -> bool:
    """Whether mpirun started this process as one that never gets a request (`engine=MPI`).

    DJL then starts one process per GPU and talks to the first, which here runs the model on all GPUs.
    """
    return os.environ.get("OMPI_COMM_WORLD_RANK", "0") != "0"


def open_worker_model(properties: Mapping[str, Any]) -> Model:
    """The model that DJL's properties name, prepared to be run. Raises DjlTrtllmError.

    Reads the configuration from the directory and the environment, so that every value has its origin. Of DJL's own
    properties it uses only the path of a model that DJL has downloaded.
    """
    mark_lines()
    # The engine process must not join DJL's MPI world.
    for name in [name for name in os.environ if name.startswith(_MPI_VARIABLES)]:
        del os.environ[name]
    directory = Path(str(properties.get("model_dir") or Path.cwd()))
    source = open_source(directory, os.environ)
    given, own = properties.get("model_id"), source.config.options.model_id
    if given and given != own and Path(str(given)).is_dir():
        source = open_source(directory, os.environ, [f"option.model_id={given}"])
    return prepare(source, under_djl=True)


def require_mode(properties: Mapping[str, Any], *, rolling: bool) -> None:
    """Raise ModelError if DJL uses the handler in the other mode."""
    if (str(properties.get("rolling_batch") or "disable") != "disable") is rolling:
        return
    if rolling:
        raise ModelError(
            "option.entryPoint=djl_trtllm.handler is for DJL's rolling batch: set option.rolling_batch=enable (DJL "
            "Serving 0.36 turns auto into disable), or use option.entryPoint=djl_trtllm.async_handler with "
            "option.async_mode=true"
        )
    raise ModelError(
        "option.entryPoint=djl_trtllm.async_handler is for DJL's async mode: set option.async_mode=true and "
        "option.rolling_batch=disable, or use option.entryPoint=djl_trtllm.handler"
    )


def load_status(error: DjlTrtllmError) -> int:
    """The status that DJL gets for a model that failed to load; 507 means out of memory."""
    return 507 if "out of memory" in str(error).lower() else 500


def served_request(properties: Mapping[str, str], model: str) -> ServedRequest:
    """What is reported of a request at its end; `properties` are its headers."""
    return ServedRequest(request_id(properties), "DJL", "/invocations", properties, DEFAULT.name, model)


class Metrics:
    """Metrics for DJL's log: lines on stdout, totals since the previous ones."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._requests = 0
        self._tokens = 0
        self._dimensions = f"|#Model:{service.name},Host:{socket.gethostname()}"

    def lines(self) -> list[str]:
        """The new lines; empty while nothing happens. Format: `ai.djl.metric.Metric.parse`."""
        statistics, batch = self._service.statistics, self._service.batch
        requests, tokens = statistics.requests - self._requests, statistics.generated_tokens - self._tokens
        running, waiting = (batch.running, batch.waiting) if batch is not None else (0, 0)
        if not (requests or tokens or running or waiting):
            return []
        self._requests, self._tokens = statistics.requests, statistics.generated_tokens
        values = {"Requests": requests, "GeneratedTokens": tokens, "Running": running, "Waiting": waiting}
        return [f"[METRICS]{name}.Count:{value}{self._dimensions}" for name, value in values.items()]
