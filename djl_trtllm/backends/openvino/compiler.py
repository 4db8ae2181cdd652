"""The compiler of OpenVINO engines: how it is started, and how its log is read."""

from __future__ import annotations

import re

from djl_trtllm.engines.compiler import DISK, HOST_MEMORY, Cause, Compiler

COMPILER = Compiler(
    module="djl_trtllm.backends.openvino.compile",
    packages=("torch", "openvino", "openvino-tokenizers", "optimum-intel", "nncf"),
    install="pip install 'djl-trtllm[compile]'",
    phases=("load", "convert", "compress", "tokenizer", "save"),
    causes=(
        HOST_MEMORY,
        DISK,
        Cause(
            "unsupported architecture",
            re.compile(r"custom or unsupported architecture|does not recognize this architecture"),
            "OpenVINO's export does not have this model: serve it with TensorRT-LLM on a GPU, or, where the checkpoint "
            "brings code of its own that you have read, set option.trust_remote_code=true",
        ),
    ),
)
