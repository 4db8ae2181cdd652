"""The compiler of OpenVINO engines: how it is started, its input, and how its log is read."""

from __future__ import annotations

import re

from djl_trtllm.backends.openvino.engine_files import NO_ATTENTION
from djl_trtllm.backends.openvino.loading_report import MARK
from djl_trtllm.backends.openvino.stored_formats import MARK as FORMAT_MARK
from djl_trtllm.engines.compiler import DISK, HOST_MEMORY, Cause, Compiler
from djl_trtllm.engines.spec import CompileSpec


class OpenVinoSpec(CompileSpec, frozen=True, kw_only=True):
    """`dtype` is fp32, fp16 or bf16, the type of weights that are not quantised; `quantize` none, int8, int4 or awq."""

    dtype: str
    quantize: str
    trust_remote_code: bool


COMPILER = Compiler(
    module="djl_trtllm.backends.openvino.compile",
    packages=("torch", "openvino", "openvino-tokenizers", "optimum-intel", "nncf"),
    install="pip install 'djl-trtllm[compile]'",
    phases=("load", "convert", "compress", "tokenizer", "save"),
    causes=(
        HOST_MEMORY,
        DISK,
        Cause(
            "checkpoint does not fit its config.json",
            re.compile(rf"^{MARK}|size mismatch for |automatic conversion of the weights"),
            "download or copy the checkpoint again, with the config.json that belongs to it; a model that lacks "
            "tensors would run with random numbers in their place",
        ),
        Cause(
            "quantised checkpoint",
            re.compile(rf"^{FORMAT_MARK}"),
            "serve the checkpoint before quantisation, with option.quantize=int4 or int8 where its size matters",
        ),
        Cause(
            "unsupported architecture",
            re.compile(rf"^{NO_ATTENTION}"),
            "serve it with TensorRT-LLM on a GPU (option.backend=tensorrt or pytorch), if that has it, or take a model "
            "with attention",
        ),
        Cause(
            "unsupported architecture",
            re.compile(r"custom or unsupported architecture|does not recognize this architecture"),
            "OpenVINO's export does not have this model: serve it with TensorRT-LLM on a GPU, or, where the checkpoint "
            "brings code of its own that you have read, set option.trust_remote_code=true",
        ),
    ),
)
