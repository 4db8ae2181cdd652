from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from djl_trtllm.api.triton.protocol import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from djl_trtllm.config import Options
from djl_trtllm.errors import GenerationError, InvalidRequestError, UnknownModelError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from djl_trtllm.server import triton_stream
from djl_trtllm.server.body_memory import BodyMemory
from djl_trtllm.server.triton_stream import SlowClient, TritonStream, WholeResponse, joined, start
from djl_trtllm.service import ServedModel
from djl_trtllm.service.clients import Clients
from djl_trtllm.telemetry import ServedRequest, Telemetry
from djl_trtllm.telemetry.served_request import Generated
from tests.server.application import application
from tests.support.in_process import PROMPT, Hosts
from tests.support.virtual_time import in_virtual_time

CALLER = Clients(Options()).caller(None, {}, None)


def message(tokens: int = 4, name: str = "story", identifier: str = "7", *, stream: bool = True) -> bytes:
    made = ModelInferRequest(model_name=name, id=identifier)
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    made.inputs.add(name="text_input", datatype="BYTES", shape=(1, 1)).contents.bytes_contents.append(PROMPT.encode())
    made.inputs.add(name="max_tokens", datatype="INT32", shape=(1, 1)).contents.int_contents.append(tokens)
    made.inputs.add(name="stream", datatype="BOOL", shape=(1, 1)).contents.bool_contents.append(stream)
    data: bytes = made.SerializeToString()
    return data


def generated(request: ServedRequest) -> Generated:
    found = request.generated()
    assert found is not None
    return found


def request() -> ServedRequest:
    return ServedRequest("call", "gRPC", "ModelInfer")


class Told(Telemetry):
    """Keeps what it receives."""

    def __init__(self, requests: list[ServedRequest]) -> None:
        super().__init__()
        self._requests = requests

    def ended(self, request: ServedRequest) -> None:
        self._requests.append(request)


class Talk:
    """A stream over a model, and what its client sends and receives."""

    def __init__(
        self, model: ServedModel, *, fails: bool = False, write_timeout: float = 30.0, memory: int = 1_000_000
    ) -> None:
        self.model = model
        self.received: list[Any] = []
        self._reads = asyncio.Event()
        self._reads.set()
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.told: list[ServedRequest] = []
        call = ServedRequest("call", "gRPC", "ModelStreamInfer", {"a": "b"}, "triton")
        self.bodies = BodyMemory(memory)
        self.stream = TritonStream(
            self._write, self._find, write_timeout, call, Told(self.told), CALLER, self.bodies, fails=fails
        )
        self.task = asyncio.ensure_future(self.stream.run(self._requests()))

    def reads(self, whether: bool) -> None:
        """Whether the client reads."""
        (self._reads.set if whether else self._reads.clear)()

    def send(self, *messages: bytes | None) -> None:
        """Send requests, None for the end."""
        for each in messages:
            self._sent.put_nowait(each)

    @property
    def lines(self) -> list[tuple[str, str, int | str, str]]:
        """What was reported of each request that has ended."""
        return [(one.id, one.model, one.status, one.error) for one in self.told]

    @property
    def texts(self) -> list[str]:
        return [
            response.infer_response.raw_output_contents[0][4:].decode()
            for response in self.received
            if response.infer_response.raw_output_contents
        ]

    @property
    def errors(self) -> list[str]:
        return [response.error_message for response in self.received if response.error_message]

    def _find(self, request: Any) -> ServedModel:
        if request.model_name != self.model.name:
            raise UnknownModelError(f"there is no {request.model_name}", name=request.model_name)
        return self.model

    async def _requests(self) -> AsyncIterator[bytes]:
        while (data := await self._sent.get()) is not None:
            yield data

    async def _write(self, data: bytes) -> None:
        await self._reads.wait()
        self.received.append(ModelStreamInferResponse.FromString(data))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@in_virtual_time
async def test_a_request_counts_as_memory_of_bodies_until_it_is_read(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry.models["story"], memory=100_000)
        seen: list[int] = []
        find = talk.stream._find

        def noting(request: Any) -> ServedModel:
            seen.append(talk.bodies.used)
            return find(request)

        talk.stream._find = noting
        large = message(2) + ModelInferRequest(parameters={"a": {"string_param": "x" * 100_000}}).SerializeToString()
        talk.send(message(2), large)
        await settle()
        assert seen == [len(message(2))]
        assert talk.bodies.used == 0
        assert "max_body_memory=100000" in talk.errors[0]
        talk.send(None)
        hosts.last.step()
        hosts.last.step()
        await talk.task


@in_virtual_time
async def test_requests_run_together_and_end_with_the_stream(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry.models["story"])
        talk.send(message(2, identifier="a"), message(3, identifier="b"), None)
        await settle()
        for _ in range(3):
            hosts.last.step()
            await settle()
        await asyncio.wait_for(talk.task, 30)
        ids = [response.infer_response.id for response in talk.received]
        assert ids == ["a", "b", "a", "a", "b", "b", "b"]
        finals = [response.infer_response.parameters["triton_final_response"].bool_param for response in talk.received]
        assert finals == [False, False, False, True, False, False, True]
        assert talk.lines == [("a", "story", "OK", ""), ("b", "story", "OK", "")]
        assert [generated(one).reasons for one in talk.told] == [("length",)] * 2
        assert all(
            (one.path, one.dialect, one.headers["a"]) == ("ModelStreamInfer", "triton", "b") for one in talk.told
        )


@in_virtual_time
async def test_what_comes_while_the_client_does_not_read_is_sent_together(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry.models["story"])
        talk.send(message(6), None)
        await settle()
        talk.reads(False)
        for _ in range(6):
            hosts.last.step()
            await settle()
        talk.reads(True)
        await asyncio.wait_for(talk.task, 30)
        assert len(talk.texts) == 2
        assert "".join(talk.texts) == tokenizer.decode(tokenizer.encode(PROMPT)[:6])


@in_virtual_time
async def test_a_client_that_does_not_read_is_dropped_and_its_requests_end(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry.models["story"], write_timeout=0.05)
        talk.send(message(6))
        await settle()
        talk.reads(False)
        hosts.last.step()
        began = asyncio.get_running_loop().time()
        with pytest.raises(SlowClient):
            await asyncio.wait_for(talk.task, 30)
        assert asyncio.get_running_loop().time() - began < 1
        assert len(hosts.last.cancelled) == 1


@in_virtual_time
async def test_errors_are_responses_and_leave_the_stream_open(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, resume_after_restart=False) as served:
        talk = Talk(served.registry.models["story"])
        talk.send(message(name="hen", identifier="1"), b"\xff\xff", message(2, identifier="2"), message(identifier="3"))
        await settle()
        hosts.last.step()
        await settle()
        assert talk.errors == ["there is no hen", "the message is not a valid inference.ModelInferRequest"]
        assert [response.infer_response.id for response in talk.received] == ["1", "", "2", "3"]
        hosts.last.die()
        await settle()
        assert len(talk.errors) == 4 and "the engine failed" in talk.errors[-1]
        talk.send(None)
        await asyncio.wait_for(talk.task, 30)
        assert talk.lines == [
            ("1", "hen", "NOT_FOUND", "UnknownModelError"),
            ("call", "", "INVALID_ARGUMENT", "InvalidRequestError"),
            ("2", "story", "INTERNAL", "GenerationError"),
            ("3", "story", "INTERNAL", "GenerationError"),
        ]


@in_virtual_time
async def test_the_first_error_may_end_the_stream(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry.models["story"], fails=True)
        talk.send(message(), message(name="hen"))
        with pytest.raises(UnknownModelError, match="no hen"):
            await asyncio.wait_for(talk.task, 30)
        assert len(hosts.last.cancelled) == 1
        assert talk.received == []


@in_virtual_time
async def test_a_defect_is_reported_without_its_message(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> list[bytes]:
        raise ValueError("secret")

    async with application(tokenizer) as served:
        talk = Talk(served.registry.models["story"])
        talk.send(message())
        await settle()
        monkeypatch.setattr("djl_trtllm.api.triton.rpc.output_tensors", broken)
        hosts.last.step()
        talk.send(None)
        await asyncio.wait_for(talk.task, 30)
        assert talk.errors == ["Internal server error, see the server's log."]
        assert len(hosts.last.cancelled) == 1

    assert "ValueError: secret" in caplog.text


@in_virtual_time
async def test_a_client_that_leaves_ends_its_requests(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry.models["story"])
        talk.send(message(), message())
        await settle()
        talk.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await talk.task
        assert len(hosts.last.cancelled) == 2
        assert talk.lines == [("7", "story", "CANCELLED", "")] * 2
        assert [generated(one).reasons for one in talk.told] == [("cancelled",)] * 2


@in_virtual_time
async def test_a_request_whose_client_leaves_while_it_is_read_is_told(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started(*_: Any, **__: Any) -> None:
        await asyncio.sleep(30)

    async with application(tokenizer) as served:
        monkeypatch.setattr(triton_stream, "start", started)
        talk = Talk(served.registry.models["story"])
        talk.send(message())
        await settle()
        talk.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await talk.task
        assert talk.lines == [("call", "", "CANCELLED", "")]


@in_virtual_time
async def test_a_stream_has_a_number_of_requests_at_most(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_stream, "_MOST_RUNNING", 2)

    async with application(tokenizer) as served:
        talk = Talk(served.registry.models["story"])
        talk.send(message(1), message(2), message(name="hen"), message(1), None)
        await settle()
        assert len(hosts.last.submitted) == 2
        hosts.last.step()
        await settle()
        assert len(hosts.last.submitted) == 3
        assert talk.errors == ["there is no hen"]
        hosts.last.step()
        await asyncio.wait_for(talk.task, 30)


@in_virtual_time
async def test_a_stream_that_is_to_end_waits_for_what_runs(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry.models["story"])
        talk.send(message(2))
        await settle()
        talk.stream.end()
        await settle()
        assert not talk.task.done()
        hosts.last.step(2)
        await asyncio.wait_for(talk.task, 30)
        assert len(talk.texts) == 1


@in_virtual_time
async def test_one_request_by_itself(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, resume_after_restart=False) as served:
        model = served.registry.models["story"]
        response = WholeResponse()
        running = await start(
            message(2, stream=False),
            ModelInferRequest(),
            lambda _: model,
            response.deliver,
            request(),
            CALLER,
            streams=False,
        )
        hosts.last.step(2)
        data = await asyncio.wait_for(response.of(running), 30)
        text = ModelInferResponse.FromString(data).raw_output_contents[0][4:].decode()
        assert text == tokenizer.decode(tokenizer.encode(PROMPT)[:2])
        failing = WholeResponse()
        running = await start(
            message(2, stream=False),
            ModelInferRequest(),
            lambda _: model,
            failing.deliver,
            request(),
            CALLER,
            streams=False,
        )
        hosts.last.die()
        with pytest.raises(GenerationError):
            await asyncio.wait_for(failing.of(running), 30)
        with pytest.raises(InvalidRequestError, match="not a valid"):
            await start(
                b"\xff", ModelInferRequest(), lambda _: model, failing.deliver, request(), CALLER, streams=False
            )


def test_chunks_of_a_sequence_are_joined() -> None:
    def chunk(text: str, index: int, finished: SequenceResult | None = None, generation: int = 0) -> OutputChunk:
        return OutputChunk(index, [Token(1, text, None, False)], finished, generation)

    end = SequenceResult(FinishReason.LENGTH, 2, None, None)
    found = joined([chunk("a", 0), chunk("x", 1), chunk("b", 0, end), chunk("o", 0, None, 1)])
    shown = [("".join(t.text for t in each.tokens), each.index, each.finished, each.generation) for each in found]
    assert shown == [("ab", 0, end, 0), ("x", 1, None, 0), ("o", 0, None, 1)]
