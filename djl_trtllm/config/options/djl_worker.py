"""Keys about DJL Serving's worker pools and model loader."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.option import Option
from djl_trtllm.config.options.documents import DJL
from djl_trtllm.config.options.group import OptionGroup


class DjlWorkerOptions(OptionGroup):
    """Accepted as they are; `effect` says what each does here."""

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
    gpu_min_workers: Annotated[
        int | None,
        Option(
            "gpu.minWorkers",
            "Fewest worker processes per model on GPUs.",
            aliases=("gpu.minworkers",),
            unit="processes",
            at_least=0,
            example="1",
            effect="no effect: one engine process serves a model",
            source=DJL,
        ),
    ] = None
    gpu_max_workers: Annotated[
        int | None,
        Option(
            "gpu.maxWorkers",
            "Most worker processes per model on GPUs.",
            aliases=("gpu.maxworkers",),
            unit="processes",
            at_least=0,
            example="1",
            effect="no effect: one engine process serves a model",
            source=DJL,
        ),
    ] = None
    cpu_min_workers: Annotated[
        int | None,
        Option(
            "cpu.minWorkers",
            "Fewest worker processes per model on CPUs.",
            aliases=("cpu.minworkers",),
            unit="processes",
            at_least=0,
            example="1",
            effect="no effect: one engine process serves a model",
            source=DJL,
        ),
    ] = None
    cpu_max_workers: Annotated[
        int | None,
        Option(
            "cpu.maxWorkers",
            "Most worker processes per model on CPUs.",
            aliases=("cpu.maxworkers",),
            unit="processes",
            at_least=0,
            example="1",
            effect="no effect: one engine process serves a model",
            source=DJL,
        ),
    ] = None
    max_dynamic_batch_size: Annotated[
        int | None,
        Option(
            "max_dynamic_batch_size",
            "Most requests of one dynamic batch.",
            unit="requests",
            at_least=1,
            example="1",
            effect="no effect: batching is in flight, see option.max_rolling_batch_size",
            source=DJL,
        ),
    ] = None
    required_memory_mb: Annotated[
        int | None,
        Option(
            "required_memory_mb",
            "Memory that must be free for the model to be loaded.",
            unit="megabytes",
            at_least=0,
            example="1024",
            effect="no effect: loading fails with its own message where memory is short",
            source=DJL,
        ),
    ] = None
    reserved_memory_mb: Annotated[
        int | None,
        Option(
            "reserved_memory_mb",
            "Memory that loading a model must leave free.",
            unit="megabytes",
            at_least=0,
            example="500",
            effect="no effect: option.kv_cache_free_gpu_mem_fraction leaves memory free",
            source=DJL,
        ),
    ] = None
    gpu_required_memory_mb: Annotated[
        int | None,
        Option(
            "gpu.required_memory_mb",
            "Memory on the GPU that must be free for the model to be loaded.",
            unit="megabytes",
            at_least=0,
            example="1024",
            effect="no effect: loading fails with its own message where memory is short",
            source=DJL,
        ),
    ] = None
    gpu_reserved_memory_mb: Annotated[
        int | None,
        Option(
            "gpu.reserved_memory_mb",
            "Memory on the GPU that loading a model must leave free.",
            unit="megabytes",
            at_least=0,
            example="500",
            effect="no effect: option.kv_cache_free_gpu_mem_fraction leaves memory free",
            source=DJL,
        ),
    ] = None
    cpu_required_memory_mb: Annotated[
        int | None,
        Option(
            "cpu.required_memory_mb",
            "Memory of the host that must be free for the model to be loaded.",
            unit="megabytes",
            at_least=0,
            example="1024",
            effect="no effect: loading fails with its own message where memory is short",
            source=DJL,
        ),
    ] = None
    cpu_reserved_memory_mb: Annotated[
        int | None,
        Option(
            "cpu.reserved_memory_mb",
            "Memory of the host that loading a model must leave free.",
            unit="megabytes",
            at_least=0,
            example="500",
            effect="no effect: option.kv_cache_free_gpu_mem_fraction leaves memory free",
            source=DJL,
        ),
    ] = None
    log_request_metric: Annotated[
        bool,
        Option(
            "log_request_metric",
            "Log measurements of every request.",
            effect="no effect: measurements are at /metrics",
            source=DJL,
        ),
    ] = False
    metrics_aggregation: Annotated[
        int,
        Option(
            "metrics_aggregation",
            "Requests over which logged measurements are summed up.",
            unit="requests",
            at_least=1,
            effect="no effect: measurements are at /metrics",
            source=DJL,
        ),
    ] = 1000
    translator_factory: Annotated[
        str | None,
        Option(
            "translatorFactory",
            "Class that translates requests for Java models.",
            aliases=("translatorfactory",),
            example="ai.djl.translate.NoopServingTranslatorFactory",
            effect="no effect: this server runs no Java engine",
            source=DJL,
        ),
    ] = None
    translator: Annotated[
        str | None,
        Option(
            "translator",
            "Translator of a Java model.",
            example="ai.djl.translate.NoopServingTranslatorFactory",
            effect="no effect: this server runs no Java engine",
            source=DJL,
        ),
    ] = None
    application: Annotated[
        str | None,
        Option(
            "application",
            "Kind of a Java model.",
            example="nlp/text_generation",
            effect="no effect: this server runs no Java engine",
            source=DJL,
        ),
    ] = None
