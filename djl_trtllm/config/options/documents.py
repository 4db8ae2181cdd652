"""Where options come from: the documents and systems that the declarations cite."""

from __future__ import annotations

LMI = "lmi-trt-llm.md"
FINDING = "finding-max-num-tokens.md"
RUNTIME = "useful-runtime-options.md"
TRITON = "Triton's TensorRT-LLM backend"
TRUSS = "truss-trt-llm.md"
DJL = "DJL Serving"
TRTLLM = "TensorRT-LLM"
OURS = "this server"
