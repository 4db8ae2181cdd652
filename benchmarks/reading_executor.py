"""TensorRT-LLM's executor without what this project does with the results: the peer of engine_process.py."""

from __future__ import annotations

from djl_trtllm.backends.tensorrt_llm.executor import TensorRtLlmExecutor
from djl_trtllm.backends.tensorrt_llm.running_request import RunningRequest
from djl_trtllm.request import FinishReason


class ReadingExecutor(TensorRtLlmExecutor):
    """Takes every response, as any program has to, and reports only the ends."""

    async def _follow(self, request: RunningRequest) -> None:
        async for _ in request.result:
            pass
        request.end(FinishReason.LENGTH)
        del self._requests[request.message.request_id]
