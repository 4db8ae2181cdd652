"""The compiler of TensorRT engines: how it is started, its input, and how its log is read."""

from __future__ import annotations

import re
from typing import Any

from djl_trtllm.backends.tensorrt_llm.ranks import DIED
from djl_trtllm.engines.compiler import DISK, GPU_MEMORY, HOST_MEMORY, Cause, Compiler
from djl_trtllm.engines.spec import CompileSpec


class TensorRtLlmSpec(CompileSpec, frozen=True, kw_only=True):
    """`arguments` are those of TensorRT-LLM's LLM, as plain data (see `backends.tensorrt_llm.objects.build_arguments`).

    `converter_alias` is a name that TensorRT-LLM must find in the checkpoint's path (see `converter_aliases`).
    """

    arguments: dict[str, Any]
    converter_alias: str | None = None


COMPILER = Compiler(
    module="djl_trtllm.backends.tensorrt_llm.compile",
    packages=("tensorrt-llm",),
    install="pip install 'djl-trtllm[trtllm]', or use TensorRT-LLM's container",
    phases=("start", "download", "convert", "quantize", "build", "save"),
    # The labels of LLM's own steps (llmapi/llm_utils.py), and what its quantiser prints.
    phase_lines={
        "download": re.compile(r"Downloading HF model"),
        "convert": re.compile(r"Loading (HF model|TRT checkpoints) to memory"),
        "quantize": re.compile(r"Starting quantization|Loading calibration dataset|Calibrating batch"),
        "build": re.compile(r"Build(ing)? (TRT-LLM|TensorRT) engine"),
    },
    causes=(
        GPU_MEMORY,
        HOST_MEMORY,
        DISK,
        Cause(
            "unsupported architecture",
            re.compile(r"architecture .*not supported|[Uu]nsupported (model )?architecture|not recognize this archi"),
            "this TensorRT-LLM does not compile the model: option.backend=pytorch may run it, and so may another "
            "version (docs/models.md says which)",
        ),
        Cause(
            "unsupported quantisation",
            re.compile(r"Unsupported quantization_config|conflicting with (kv_cache_)?quant_algo"),
            "this TensorRT-LLM does not compile a checkpoint that is quantised so: option.backend=pytorch may run it, "
            "or quantise the original checkpoint while compiling (option.quantize)",
        ),
        Cause(
            "bad option",
            re.compile(
                r"LLM got invalid argument|validation errors? for \w*(Args|Config)|Plugin \w+ expects"
                r"|unexpected keyword argument|^ValueError: "
            ),
            "an option became an argument that this TensorRT-LLM does not take: the log names it, and "
            "`djl-trtllm config` shows which options are set",
        ),
        Cause(
            "versions that do not belong together",
            re.compile(
                r"^(ImportError|ModuleNotFoundError): |undefined symbol|driver version is insufficient"
                r"|no kernel image is available|Cuda failure: 'system|cannot open shared object file"
            ),
            "TensorRT-LLM, its CUDA libraries and the driver have to fit: use NVIDIA's container of this release, and "
            "a driver that its release notes name",
        ),
        Cause(
            "a rank died",
            re.compile(re.escape(DIED)),
            "where the log has no message of its own it was killed, most often for lack of host memory: give the "
            "machine or the container more, for each rank as much as the checkpoint takes",
        ),
    ),
    # TensorRT-LLM's own cache knows neither GPU nor weights; the one here does.
    environment={"TLLM_LLMAPI_BUILD_CACHE": "0"},
)
