"""A TensorRT-LLM that the test plays, in this process."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.backends.tensorrt_llm import executor as tensorrt_llm
from djl_trtllm.backends.tensorrt_llm.executor import TensorRtLlmExecutor
from djl_trtllm.executor.protocol import Delta, Step, Submit
from djl_trtllm.executor.step_buffer import StepBuffer
from djl_trtllm.request import Sampling

END = 2


class RequestError(Exception):
    """TensorRT-LLM's."""


class Parameters(SimpleNamespace):
    """An object that is made of keyword arguments."""


class LoRARequest(SimpleNamespace):
    def __init__(self, name: str, number: int, path: str) -> None:
        super().__init__(name=name, number=number, path=path)


class PlayedResult:
    """TensorRT-LLM's future of one request; every `say` and `fail` is one response of the engine."""

    def __init__(self, prompt_ids: list[int], beams: int) -> None:
        self.prompt_ids = prompt_ids
        self.outputs = [
            SimpleNamespace(token_ids=[], logprobs=[], finish_reason=None, stop_reason=None) for _ in range(beams)
        ]
        self.cached_tokens = 0
        self.aborts = 0
        self.abort_error: Exception | None = None
        self._responses: asyncio.Queue[Callable[[], None] | None] = asyncio.Queue()

    def say(self, *token_ids: int, end: str | None = None) -> None:
        def respond() -> None:
            self.outputs[0].token_ids = [*self.outputs[0].token_ids, *token_ids]
            for output in self.outputs:
                output.finish_reason = end

        self._responses.put_nowait(respond)
        if end is not None:
            self._responses.put_nowait(None)

    def fail(self, error: Exception) -> None:
        def respond() -> None:
            raise error

        self._responses.put_nowait(respond)

    def abort(self) -> None:
        self.aborts += 1
        if self.abort_error is not None:
            raise self.abort_error

    def __aiter__(self) -> PlayedResult:
        return self

    async def __anext__(self) -> PlayedResult:
        respond = await self._responses.get()
        if respond is None:
            raise StopAsyncIteration
        respond()
        return self


class PlayedLlm:
    """TensorRT-LLM's LLM. `refusal` is what generate_async raises, `iterations` what its statistics bring."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.tokenizer = SimpleNamespace(eos_token_id=END)
        self.results: list[PlayedResult] = []
        self.calls: list[dict[str, Any]] = []
        self.refusal: Exception | None = None
        self.iterations: Callable[[], list[dict[str, Any]]] = list
        self.shutdowns = 0
        self.shut_down: Callable[[], None] = lambda: None
        self._executor = SimpleNamespace(_error_queue=queue.Queue(), is_shutdown=lambda: False)

    def generate_async(self, inputs: list[int], **arguments: Any) -> PlayedResult:
        self.calls.append({"inputs": inputs, **arguments})
        if self.refusal is not None:
            raise self.refusal
        self.results.append(PlayedResult(inputs, getattr(arguments["sampling_params"], "n", 1)))
        return self.results[-1]

    async def get_stats_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        assert timeout == 0
        for iteration in self.iterations():
            yield iteration
        raise asyncio.QueueEmpty

    def shutdown(self) -> None:
        self.shutdowns += 1
        self.shut_down()


class Engine:
    """An executor over a played TensorRT-LLM, and what it has sent."""

    def __init__(self, version: str, **options: Any) -> None:
        values: dict[str, Any] = {
            "backend": "pytorch",
            "model": "model",
            "tokenizer": "tokenizer",
            "arguments": {},
            "max_sequences": 8,
            "max_seq_len": 100,
            **options,
        }
        self.version = version
        self.executor = TensorRtLlmExecutor(**values)
        self.llm: PlayedLlm = self.executor._llm
        self.steps: list[Step] = []
        self.sent_at: list[float] = []
        self.running: asyncio.Task[None]

    async def begin(self) -> None:
        """Let it run on the present event loop."""
        self.running = asyncio.ensure_future(self.executor.run(StepBuffer(self._send, self.executor.stats)))
        await asyncio.sleep(0)

    def _send(self, step: Step) -> None:
        self.steps.append(step)
        self.sent_at.append(round(asyncio.get_running_loop().time(), 6))

    def submit(self, request_id: int, tokens: int = 9, **fields: Any) -> PlayedResult:
        """`fields` are those of Sampling and of Submit. Returns the future of it."""
        sampling = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
        self.executor.submit(Submit(request_id, [5, 6], Sampling(tokens, **sampling), **fields))
        return self.llm.results[-1] if self.llm.results else PlayedResult([], 1)

    @property
    def deltas(self) -> list[Delta]:
        return [delta for step in self.steps for delta in step.deltas]

    async def ended(self) -> None:
        """End whatever runs, and see it end."""
        tasks = [self.running, *(request.task for request in self.executor._requests.values())]
        tasks += [request.task for request in self.executor._unanswered]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


MakeEngine = Callable[..., Engine]


def patched(monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """`make(version, **options)`: an executor over a TensorRT-LLM that is played."""

    def make(version: str = "1.2.1", **options: Any) -> Engine:
        module = SimpleNamespace(
            __version__=version,
            LLM=PlayedLlm,
            SamplingParams=Parameters,
            GuidedDecodingParams=Parameters,
            LoRARequest=LoRARequest,
            RequestError=RequestError,
        )
        monkeypatch.setattr(tensorrt_llm, "import_module", lambda name: module)
        monkeypatch.setattr(tensorrt_llm, "build_arguments", dict)
        monkeypatch.setattr(tensorrt_llm, "_WORDS_SECONDS", 0.0)
        return Engine(version, **options)

    return make
