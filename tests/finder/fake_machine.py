"""A machine with the fake TensorRT-LLM, as this process is to see it."""

from __future__ import annotations

from dataclasses import replace

from djl_trtllm.backends.registry import this_machine
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.hardware import Hardware


def hardware(memory: int) -> Hardware:
    """One GPU of this many bytes, and TensorRT-LLM 1.2.1."""
    return replace(
        this_machine(),
        gpus=(Gpu("NVIDIA H200", (9, 0), memory),),
        tensorrt_llm="1.2.1",
        tensorrt="10.13.3.9",
        driver="580.65.06",
        engine_backend=True,
    )
