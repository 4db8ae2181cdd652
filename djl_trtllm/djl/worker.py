"""The model of a DJL worker process: from the properties of DJL's first call to its end."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from djl_trtllm.config import load
from djl_trtllm.errors import DjlTrtllmError, ModelError
from djl_trtllm.service import Model, ModelService, open_source, prepare

logger = logging.getLogger(__name__)

METRICS_SECONDS = 60.0
_MPI_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_")


def is_passive() -> bool:
    """Whether mpirun started this process as one that never gets a request (`engine=MPI`).

    DJL starts one process per GPU then and talks to the first. Here that one has the model, on all GPUs.
    """
    return os.environ.get("OMPI_COMM_WORLD_RANK", "0") != "0"


def open_worker_model(properties: Mapping[str, Any]) -> Model:
    """The model that DJL's properties name, prepared to be run. Raises DjlTrtllmError.

    The configuration is read from the directory and the environment, as everywhere, so that every value has its origin.
    Of DJL's own word only one counts: where it has put a model that it fetched.
    """
    # The executor host is no part of DJL's MPI world.
    for name in [name for name in os.environ if name.startswith(_MPI_VARIABLES)]:
        del os.environ[name]
    directory = Path(str(properties.get("model_dir") or Path.cwd()))
    source = open_source(directory, os.environ)
    given, own = properties.get("model_id"), source.config.options.model_id
    if given and given != own and Path(str(given)).is_dir():
        config = load(directory, os.environ, arguments=[f"option.model_id={given}"])
        source = type(source)(source.name, source.directory, config)
    return prepare(source)


def require_mode(properties: Mapping[str, Any], *, rolling: bool) -> None:
    """Raises ModelError where DJL is to use the handler in another way than it is made for."""
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
    """What DJL is told of a model that did not load; 507 is its word for memory that ran out."""
    return 507 if "out of memory" in str(error).lower() else 500


class Metrics:
    """What DJL's log gets as metrics: lines on stdout, totals since the last ones."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._requests = 0
        self._tokens = 0
        self._dimensions = f"|#Model:{service.name},Host:{socket.gethostname()}"

    def lines(self) -> list[str]:
        """None while nothing happens. Format: `ai.djl.metric.Metric.parse`."""
        statistics, batch = self._service.statistics, self._service.batch
        requests, tokens = statistics.requests - self._requests, statistics.generated_tokens - self._tokens
        running, waiting = (batch.running, batch.waiting) if batch is not None else (0, 0)
        if not (requests or tokens or running or waiting):
            return []
        self._requests, self._tokens = statistics.requests, statistics.generated_tokens
        values = {"Requests": requests, "GeneratedTokens": tokens, "Running": running, "Waiting": waiting}
        return [f"[METRICS]{name}.Count:{value}{self._dimensions}" for name, value in values.items()]
