"""Keys that DJL Serving reads itself.

The same model directory runs under DJL Serving, where they count, and under this server, where most have nothing
to act on. They are declared so that each is answered by name.
"""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.choices import RollingBatch
from djl_trtllm.config.option import Option, Scope
from djl_trtllm.config.options.group import OptionGroup

DJL = "DJL Serving"


class DjlOptions(OptionGroup):
    """Accepted as they are; `effect` says what each does here."""

    engine: Annotated[
        str | None,
        Option(
            "engine",
            "DJL Serving's engine, `Python` or `MPI`.",
            example="Python",
            effect="no effect: this server runs no Java engine; under DJL Serving use Python",
            source=DJL,
        ),
    ] = None
    rolling_batch: Annotated[
        RollingBatch,
        Option(
            "option.rolling_batch",
            "`auto` and `trtllm` are what this server does anyway. `disable` under DJL Serving selects its async mode; "
            "here batching stays in flight. `vllm`, `lmi-dist` and `scheduler` name other batching libraries; "
            "requests are batched by this server all the same.",
            value_aliases={"lmi_dist": "lmi-dist", "tensorrt_llm": "trtllm", "tensorrt-llm": "trtllm"},
            effect="no effect: requests are always batched in flight",
            source=DJL,
        ),
    ] = RollingBatch.AUTO
    mpi_mode: Annotated[
        bool,
        Option(
            "option.mpi_mode",
            "Start one Python process per GPU through mpirun.",
            effect="no effect: the engine process starts its own ranks",
            source=DJL,
        ),
    ] = False
    async_mode: Annotated[
        bool,
        Option(
            "option.async_mode",
            "Use an asynchronous handler under DJL Serving.",
            effect="no effect here; under DJL Serving it selects the async handler",
            source=DJL,
        ),
    ] = False
    entry_point: Annotated[
        str | None,
        Option(
            "option.entryPoint",
            "Python module or file with the handler, under DJL Serving.",
            aliases=("option.entrypoint",),
            example="djl_trtllm.async_handler",
            effect="no effect here; under DJL Serving it names the handler",
            source=DJL,
        ),
    ] = None
    min_workers: Annotated[
        int | None,
        Option(
            "minWorkers",
            "Fewest worker processes per model.",
            unit="processes",
            at_least=0,
            example="1",
            effect="no effect: one engine process serves a model",
            source=DJL,
        ),
    ] = None
    max_workers: Annotated[
        int | None,
        Option(
            "maxWorkers",
            "Most worker processes per model.",
            unit="processes",
            at_least=0,
            example="1",
            effect="no effect: one engine process serves a model",
            source=DJL,
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        Option(
            "batch_size",
            "Size of DJL Serving's dynamic batches.",
            unit="requests",
            at_least=1,
            example="1",
            effect="no effect: batching is in flight, see option.max_rolling_batch_size",
            source=DJL,
        ),
    ] = None
    max_batch_delay: Annotated[
        int | None,
        Option(
            "max_batch_delay",
            "Longest wait for a dynamic batch to fill.",
            unit="milliseconds",
            at_least=0,
            example="100",
            effect="no effect: a request joins the running batch at the next iteration",
            source=DJL,
        ),
    ] = None
    max_idle_time: Annotated[
        int | None,
        Option(
            "max_idle_time",
            "Time after which an idle worker is scaled down.",
            unit="seconds",
            at_least=0,
            example="60",
            effect="no effect: the model stays loaded",
            source=DJL,
        ),
    ] = None
    load_on_devices: Annotated[
        str | None,
        Option(
            "load_on_devices",
            "Devices on which DJL Serving loads copies of the model.",
            example="*",
            effect="no effect: choose GPUs with CUDA_VISIBLE_DEVICES",
            source=DJL,
        ),
    ] = None
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
            "Models that DJL Serving loads when it starts.",
            example="ALL",
            effect="no effect: the model is named by the command line, HF_MODEL_ID or option.model_id",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
    model_store: Annotated[
        str | None,
        Option(
            "model_store",
            "Folder of DJL Serving's models.",
            example="/opt/ml/model",
            effect="no effect: the model directory is given on the command line",
            source=DJL,
            scope=Scope.SERVER,
        ),
    ] = None
