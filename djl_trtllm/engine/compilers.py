"""The compilers there are."""

from __future__ import annotations

import re

from djl_trtllm.engine.compiler import Cause, Compiler
from djl_trtllm.engine.ranks import DIED

_GPU_MEMORY = Cause(
    "out of GPU memory",
    re.compile(
        r"CUDA out of memory|OutOfMemoryError|insufficient GPU memory|Requested amount of GPU memory"
        r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|Cuda Runtime \(out of memory\)"
    ),
    "lower option.max_num_tokens, option.max_rolling_batch_size or the lengths, quantise the weights "
    "(option.quantize), or spread the model over more GPUs (option.tensor_parallel_degree)",
)
HOST_MEMORY = Cause(
    "out of host memory",
    re.compile(r"^MemoryError|std::bad_alloc|Cannot allocate memory|DefaultCPUAllocator|signal 9 \(Killed\)"),
    "give the machine or the container more memory: a checkpoint is loaded into host memory before it is compiled, "
    "once per GPU",
)
_DISK = Cause(
    "no space on the disk",
    re.compile(r"No space left on device|Disk quota exceeded"),
    "make room, or name a larger disk with option.engine_cache_dir: while an engine is compiled it takes three times "
    "the room of its weights",
)

OPENVINO = Compiler(
    module="djl_trtllm.engine.openvino",
    packages=("torch", "openvino", "openvino-tokenizers", "optimum-intel", "nncf"),
    install="pip install 'djl-trtllm[compile]'",
    phases=("load", "convert", "compress", "tokenizer", "save"),
    causes=(
        HOST_MEMORY,
        _DISK,
        Cause(
            "unsupported architecture",
            re.compile(r"custom or unsupported architecture|does not recognize this architecture"),
            "OpenVINO's export does not have this model: serve it with TensorRT-LLM on a GPU, or, where the checkpoint "
            "brings code of its own that you have read, set option.trust_remote_code=true",
        ),
    ),
)

TENSORRT_LLM = Compiler(
    module="djl_trtllm.engine.tensorrt_llm",
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
        _GPU_MEMORY,
        HOST_MEMORY,
        _DISK,
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
