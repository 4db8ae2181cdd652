"""Executors as `Start` names them."""

from __future__ import annotations

SCRIPTED = "djl_trtllm.backends.scripted.executor:ScriptedExecutor"
OPENVINO = "djl_trtllm.backends.openvino.executor:OpenVinoExecutor"
TENSORRT_LLM = "djl_trtllm.backends.tensorrt_llm.executor:TensorRtLlmExecutor"
