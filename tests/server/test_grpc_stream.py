from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from djl_trtllm.api.dialects.triton import rpc
from djl_trtllm.api.dialects.triton.dialect import TRITON
from djl_trtllm.api.dialects.triton.rpc import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
    parse_rpc,
)
from djl_trtllm.config import Options
from djl_trtllm.errors import GenerationError, InvalidRequestError, TooManyRequestsError, UnknownModelError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token, joined
from djl_trtllm.server import grpc_front_end
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.grpc_front_end import GrpcStream, Models, RpcRequests, Running, SlowClient, WholeResponse
from djl_trtllm.service.clients import Caller, Clients
from djl_trtllm.service.lifecycle import Registry
from djl_trtllm.telemetry import ServedRequest, Telemetry
from djl_trtllm.telemetry.reports import Generated
from tests.server.application import application
from tests.support.in_process import PROMPT, Hosts

CALLER = Clients(Options()).caller(None, {}, None)


def message(
    tokens: int = 4, name: str = "story", identifier: str = "7", *, stream: bool = True, prompt: str = PROMPT
) -> bytes:
    made = ModelInferRequest(model_name=name, id=identifier)
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    made.inputs.add(name="text_input", datatype="BYTES", shape=(1, 1)).contents.bytes_contents.append(prompt.encode())
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


def requests(registry: Registry, context: ServerContext | None = None, caller: Caller = CALLER) -> RpcRequests:
    context = context or ServerContext(Options())
    return RpcRequests(context, TRITON, TRITON.rpc_service(), Models(registry, TRITON), caller)


class Talk:
    """A stream over a model, and what its client sends and receives."""

    def __init__(
        self,
        registry: Registry,
        *,
        fails: bool = False,
        write_timeout: float = 30.0,
        memory: int = 1_000_000,
        caller: Caller = CALLER,
    ) -> None:
        self.received: list[Any] = []
        self._reads = asyncio.Event()
        self._reads.set()
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.told: list[ServedRequest] = []
        call = ServedRequest("call", "gRPC", "ModelStreamInfer", {"a": "b"}, "triton")
        options = Options(stream_write_timeout=write_timeout, max_body_memory=memory)
        context = ServerContext(options, telemetry=Told(self.told))
        self.bodies = context.bodies
        self.stream = GrpcStream(self._write, requests(registry, context, caller), call, fails)
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

    async def _requests(self) -> AsyncIterator[bytes]:
        while (data := await self._sent.get()) is not None:
            yield data

    async def _write(self, data: bytes) -> None:
        await self._reads.wait()
        self.received.append(ModelStreamInferResponse.FromString(data))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_request_counts_as_memory_of_bodies_until_it_is_read(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry, memory=100_000)
        seen: list[int] = []

        def noting(*arguments: Any, **keywords: Any) -> Any:
            seen.append(talk.bodies.used)
            return parse_rpc(*arguments, **keywords)

        monkeypatch.setattr(rpc, "parse_rpc", noting)
        large = message(2) + ModelInferRequest(id="x" * 100_000).SerializeToString()
        talk.send(message(2), large)
        await settle()
        assert seen == [len(message(2))]
        assert talk.bodies.used == 0
        assert "max_body_memory=100000" in talk.errors[0]
        talk.send(None)
        hosts.last.step()
        hosts.last.step()
        await talk.task


async def test_requests_run_together_and_end_with_the_stream(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry)
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


async def test_what_comes_while_the_client_does_not_read_is_sent_together(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry)
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


async def test_a_client_that_does_not_read_is_dropped_and_its_requests_end(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry, write_timeout=0.05)
        talk.send(message(6))
        await settle()
        talk.reads(False)
        hosts.last.step()
        began = asyncio.get_running_loop().time()
        with pytest.raises(SlowClient):
            await asyncio.wait_for(talk.task, 30)
        assert asyncio.get_running_loop().time() - began < 1
        assert len(hosts.last.cancelled) == 1


async def test_errors_are_responses_and_leave_the_stream_open(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, resume_after_restart=False) as served:
        talk = Talk(served.registry)
        talk.send(message(name="hen", identifier="1"), b"\xff\xff", message(2, identifier="2"), message(identifier="3"))
        await settle()
        hosts.last.step()
        await settle()
        assert talk.errors == [
            "there is no model named 'hen' here; loaded: story",
            "the message is not a valid inference.ModelInferRequest",
        ]
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


async def test_the_first_error_may_end_the_stream(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry, fails=True)
        talk.send(message(), message(name="hen"))
        with pytest.raises(UnknownModelError, match="no model named 'hen'"):
            await asyncio.wait_for(talk.task, 30)
        assert len(hosts.last.cancelled) == 1
        assert talk.received == []


async def test_a_defect_is_reported_without_its_message(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> list[bytes]:
        raise ValueError("secret")

    async with application(tokenizer) as served:
        talk = Talk(served.registry)
        talk.send(message())
        await settle()
        monkeypatch.setattr("djl_trtllm.api.dialects.triton.inference.output_tensors", broken)
        hosts.last.step()
        talk.send(None)
        await asyncio.wait_for(talk.task, 30)
        assert talk.errors == ["Internal server error, see the server's log."]
        assert len(hosts.last.cancelled) == 1

    assert "ValueError: secret" in caplog.text


async def test_a_client_that_leaves_ends_its_requests(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry)
        talk.send(message(), message())
        await settle()
        talk.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await talk.task
        assert len(hosts.last.cancelled) == 2
        assert talk.lines == [("7", "story", "CANCELLED", "")] * 2
        assert [generated(one).reasons for one in talk.told] == [("cancelled",)] * 2


async def test_a_request_whose_client_leaves_while_it_is_read_is_told(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started(*_: Any, **__: Any) -> None:
        await asyncio.sleep(30)

    async with application(tokenizer) as served:
        monkeypatch.setattr(RpcRequests, "read", started)
        talk = Talk(served.registry)
        talk.send(message())
        await settle()
        talk.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await talk.task
        assert talk.lines == [("call", "", "CANCELLED", "")]


async def test_a_stream_has_a_number_of_requests_at_most(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_front_end, "_MOST_RUNNING", 2)

    async with application(tokenizer) as served:
        talk = Talk(served.registry)
        talk.send(message(1), message(2), message(name="hen"), message(1), None)
        await settle()
        assert len(hosts.last.submitted) == 2
        hosts.last.step()
        await settle()
        assert len(hosts.last.submitted) == 3
        assert talk.errors == ["there is no model named 'hen' here; loaded: story"]
        hosts.last.step()
        await asyncio.wait_for(talk.task, 30)


async def test_requests_count_with_their_client_until_they_end_or_are_refused(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    caller = Clients(Options(max_requests_per_client=1)).caller("web-app", {}, None)
    async with application(tokenizer) as served:
        talk = Talk(served.registry, caller=caller)
        talk.send(message(prompt=PROMPT * 200), message(2, identifier="a"), message(2, identifier="b"))
        await settle()
        hosts.last.step(2)
        await settle()
        talk.send(message(1, identifier="c"), None)
        await settle()
        hosts.last.step()
        await asyncio.wait_for(talk.task, 30)
        assert ["max_requests_per_client is 1" in error for error in talk.errors] == [False, True]
        assert [(one.id, one.status) for one in talk.told] == [
            ("7", "INVALID_ARGUMENT"),
            ("b", "RESOURCE_EXHAUSTED"),
            ("a", "OK"),
            ("c", "OK"),
        ]
        assert {one.client for one in talk.told} == {"web-app"}
        await begun(served.registry, WholeResponse(), caller)
        with pytest.raises(TooManyRequestsError):
            await begun(served.registry, WholeResponse(), caller)


async def test_a_stream_that_is_to_end_waits_for_what_runs(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        talk = Talk(served.registry)
        talk.send(message(2))
        await settle()
        talk.stream.end()
        await settle()
        assert not talk.task.done()
        hosts.last.step(2)
        await asyncio.wait_for(talk.task, 30)
        assert len(talk.texts) == 1


async def test_one_request_by_itself(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, resume_after_restart=False) as served:
        response, failing = WholeResponse(), WholeResponse()
        await begun(served.registry, response)
        hosts.last.step(2)
        data = await asyncio.wait_for(response.result, 30)
        text = ModelInferResponse.FromString(data).raw_output_contents[0][4:].decode()
        assert text == tokenizer.decode(tokenizer.encode(PROMPT)[:2])
        await begun(served.registry, failing)
        hosts.last.die()
        with pytest.raises(GenerationError):
            await asyncio.wait_for(failing.result, 30)
        with pytest.raises(InvalidRequestError, match="not a valid"):
            await requests(served.registry).read(b"\xff", request())


async def begun(registry: Registry, response: WholeResponse, caller: Caller = CALLER) -> Running:
    reading = requests(registry, caller=caller)
    read = await reading.read(message(2, stream=False), request())
    return await reading.start(read, 100, response.deliver, request(), stream=False)


def test_chunks_of_a_sequence_are_joined() -> None:
    def chunk(text: str, index: int, finished: SequenceResult | None = None, generation: int = 0) -> OutputChunk:
        return OutputChunk(index, [Token(1, text, None, False)], finished, generation)

    end = SequenceResult(FinishReason.LENGTH, 2, None, None)
    found = joined([chunk("a", 0), chunk("x", 1), chunk("b", 0, end), chunk("o", 0, None, 1)])
    shown = [("".join(t.text for t in each.tokens), each.index, each.finished, each.generation) for each in found]
    assert shown == [("ab", 0, end, 0), ("x", 1, None, 0), ("o", 0, None, 1)]
