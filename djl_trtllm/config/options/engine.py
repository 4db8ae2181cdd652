"""How the engine is compiled and on what it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from djl_trtllm.config.option import Option
from djl_trtllm.config.options.group import OptionGroup

LMI = "lmi-trt-llm.md"
DJL = "DJL Serving"
OURS = "this server"


class EngineOptions(OptionGroup):
    """Parallelism, engine cache, threads and test hooks."""

    tensor_parallel_degree: Annotated[
        int | Literal["max"],
        Option(
            "option.tensor_parallel_degree",
            "GPUs over which each layer is split; `max` takes all GPUs of the machine (divided by the pipeline "
            "parallel degree).",
            aliases=("option.tensor_parallel_size",),
            unit="GPUs",
            at_least=1,
            tensorrt="LLM(tensor_parallel_size)",
            pytorch="LLM(tensor_parallel_size)",
            openvino="ignored: one CPU engine",
            source=LMI,
        ),
    ] = 1
    pipeline_parallel_degree: Annotated[
        int,
        Option(
            "option.pipeline_parallel_degree",
            "Groups of GPUs over which the layers are spread one after the other.",
            aliases=("option.pipeline_parallel_size",),
            unit="groups",
            at_least=1,
            tensorrt="LLM(pipeline_parallel_size)",
            pytorch="LLM(pipeline_parallel_size)",
            openvino="ignored: one CPU engine",
            source=DJL,
        ),
    ] = 1
    use_custom_all_reduce: Annotated[
        bool,
        Option(
            "option.use_custom_all_reduce",
            "An all-reduce kernel for GPUs joined by NVLink, chosen by hand in early TensorRT-LLM.",
            tensorrt="no effect: TensorRT-LLM chooses the all-reduce strategy itself today",
            pytorch="no effect: TensorRT-LLM chooses the all-reduce strategy itself today",
            openvino="ignored: one CPU engine",
            source=LMI,
        ),
    ] = False
    enable_trt_overlap: Annotated[
        bool,
        Option(
            "option.enable_trt_overlap",
            "Overlap the execution of batches, in early TensorRT-LLM.",
            tensorrt="no effect: the option is gone from the engine's runtime",
            pytorch="no effect: the overlap scheduler is TensorRT-LLM's default",
            openvino="no effect: OpenVINO has no such mode",
            source=LMI,
        ),
    ] = False
    engine_cache_dir: Annotated[
        Path | None,
        Option(
            "option.engine_cache_dir",
            "Folder where compiled engines are kept and looked up.",
            example="/var/cache/djl-trtllm",
            default_note="djl-trtllm in DJL_CACHE_DIR, else in SERVING_DOWNLOAD_DIR, else ~/.cache/djl-trtllm",
            effect="folder of the engine cache",
            source=OURS,
        ),
    ] = None
    inference_num_threads: Annotated[
        int | None,
        Option(
            "option.inference_num_threads",
            "CPU threads of the engine.",
            unit="threads",
            at_least=1,
            example="4",
            default_note="chosen by OpenVINO: the physical cores",
            tensorrt="ignored: the engine runs on the GPU",
            pytorch="ignored: the engine runs on the GPU",
            openvino="INFERENCE_NUM_THREADS",
            source="OpenVINO",
        ),
    ] = None
    script: Annotated[
        str | None,
        Option(
            "option.script",
            "What the scripted executor answers, as JSON. For tests and benchmarks of the server; no model is loaded.",
            example='{"tokens": 16}',
            effect="read by `option.backend=scripted` only",
            source=OURS,
        ),
    ] = None
