from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from djl_trtllm.api.base import Call, ModelContext
from djl_trtllm.api.dialects.triton import description, rpc
from djl_trtllm.api.dialects.triton.dialect import TRITON
from djl_trtllm.api.dialects.triton.rpc import parse_rpc
from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, InvalidRequestError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import OutputChunk
from djl_trtllm.server.app import bind_grpc
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.grpc_front_end import GrpcServer
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.service.clients import label
from djl_trtllm.service.lifecycle import Registry, ServedModel
from djl_trtllm.telemetry import Telemetry
from tests.api.models import check_golden
from tests.api.test_registry import every_error
from tests.server.application import Application, application
from tests.server.test_grpc_stream import message
from tests.support.in_process import Hosts, PlayedHost
from tests.support.server import free_port
from tests.support.tables import by_rows
from tests.support.virtual_time import in_real_time, until

SERVICE = f"/{rpc.SERVICE}/"


class Client:
    """A client of the methods, by name."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def ask(self, method: str, **fields: Any) -> Any:
        request = rpc.message_class(f"{method}Request")(**fields).SerializeToString()
        data = await self.channel.unary_unary(SERVICE + method)(request, timeout=60)
        return rpc.message_class(f"{method}Response").FromString(data)

    async def ask_raw(self, method: str) -> Any:
        return await self.channel.unary_unary(SERVICE + method)(b"", timeout=60)

    async def infer(self, data: bytes) -> Any:
        answer = await self.channel.unary_unary(SERVICE + "ModelInfer")(data, timeout=60)
        return rpc.ModelInferResponse.FromString(answer)

    def stream(self, *pairs: tuple[str, str]) -> Any:
        return self.channel.stream_stream(SERVICE + "ModelStreamInfer")(metadata=pairs, timeout=60)


@asynccontextmanager
async def served(
    registry: Registry, counts: ServerCounts | None = None, **options: Any
) -> AsyncIterator[tuple[GrpcServer, Client]]:
    server = GrpcServer(
        ServerContext(Options(host="127.0.0.1", **options), registry, counts=counts or ServerCounts()), TRITON, 0
    )
    server.bind()
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.bound_port}") as channel:
        try:
            yield server, Client(channel)
        finally:
            await server.close()


@asynccontextmanager
async def with_model(
    hosts: Hosts, tokenizer: Tokenizer, **options: Any
) -> AsyncIterator[tuple[Application, GrpcServer, Client]]:
    """A model `story` whose engine generates by itself."""
    hosts.alone = True
    async with application(tokenizer) as app, served(app.registry, app.counts, **options) as (server, client):
        yield app, server, client


def status(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[Any, str | None]:
    return error.value.code(), error.value.details()


@in_real_time
async def test_what_needs_no_engine(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with with_model(hosts, tokenizer) as (app, _, client):
        assert (await client.ask("ServerLive")).live and (await client.ask("ServerReady")).ready
        assert (await client.ask("ModelReady", name="ensemble", version="1")).ready
        assert not (await client.ask("ModelReady", name="ensemble", version="2")).ready
        assert not (await client.ask("ModelReady", name="hen")).ready
        assert "statistics" in (await client.ask("ServerMetadata")).extensions
        metadata = await client.ask("ModelMetadata", name="tensorrt_llm_bls")
        assert (metadata.name, len(metadata.inputs), metadata.versions) == ("tensorrt_llm_bls", 44, ["1"])
        config = (await client.ask("ModelConfig", name="story")).config
        assert config.name == "story"
        assert config.max_batch_size == app.registry.models["story"].model.options.max_rolling_batch_size
        (model,) = (await client.ask("ModelStatistics")).model_stats
        assert (model.name, model.inference_stats.success.count) == ("story", 0)
        (model,) = (await client.ask("ModelStatistics", name="ensemble")).model_stats
        assert model.name == "ensemble"
        index = (await client.ask("RepositoryIndex", ready=True)).models
        assert {each.name: each.state for each in index}["ensemble"] == "READY"


@in_real_time
async def test_messages_that_are_large_are_bounded_and_read_beside_the_event_loop(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noting(*arguments: Any, **keywords: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse_rpc(*arguments, **keywords)

    monkeypatch.setattr(rpc, "parse_rpc", noting)

    async with with_model(hosts, tokenizer, max_body_memory=1_000_000) as (_, _, client):
        for size, status_code in ((0, None), (100_000, None), (600_000, grpc.StatusCode.UNAVAILABLE)):
            padding = rpc.ModelInferRequest(outputs=[{"name": "text_output"}]).SerializeToString()
            data = message(1, stream=False) + b"\xfa\x07" + varint(size) + bytes(size) + padding
            if status_code is None:
                await client.infer(data)
                continue
            with pytest.raises(grpc.aio.AioRpcError, match="max_body_memory=1000000") as refused:
                await client.infer(data)
            assert refused.value.code() is status_code
        assert [name.startswith("work-") for name in threads] == [False, True]
        # What was read counts no longer.
        for _ in range(12):
            await client.infer(message(1, stream=False) + b"\xfa\x07" + varint(100_000) + bytes(100_000))
        many = b"\x2a\x00" * 20_000
        with pytest.raises(grpc.aio.AioRpcError, match="too many fields") as refused:
            await client.infer(many)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="expected at most 32768") as refused:
            await client.channel.unary_unary(SERVICE + "ServerLive")(bytes(32_769), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128, number >> 7 & 127 | 128, number >> 14])


@in_real_time
async def test_calls_are_counted_by_their_status_and_those_for_health_are_quiet(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: dict[str, tuple[bool, str]] = {}
    monkeypatch.setattr(
        Telemetry, "ended", lambda _, request: ended.update({request.path: (request.quiet, request.client)})
    )
    client_label = label("address 127.0.0.1")

    async with with_model(hosts, tokenizer) as (app, _, client):
        await client.ask("ServerLive")
        await client.infer(message(3, stream=False))
        await until(lambda: ended == {"ServerLive": (True, client_label), "ModelInfer": (False, client_label)})
        for ask in (client.ask("ModelMetadata", name="hen"), client.infer(message(3, "hen", stream=False))):
            with pytest.raises(grpc.aio.AioRpcError):
                await ask
        stream = client.stream()
        await stream.write(message(2))
        await stream.done_writing()
        assert [data async for data in stream]
        # A client may have its answer before the call is counted.
        await until(lambda: app.counts.grpc_calls == {"OK": 3, "NOT_FOUND": 2})
        failing = client.stream(("triton_grpc_error", "true"))
        await failing.write(message(name="preprocessing"))
        with pytest.raises(grpc.aio.AioRpcError):
            await failing.read()
        await until(lambda: app.counts.grpc_calls["INVALID_ARGUMENT"] == 1)
        # A call with nothing left to do may end before its cancellation arrives.
        hosts.alone, before = False, len(hosts.last.submitted)
        left = client.stream()
        await left.write(message(3))
        await until(lambda: len(hosts.last.submitted) == before + 1)
        hosts.last.step()
        await left.read()
        left.cancel()
        await until(lambda: app.counts.grpc_calls["CANCELLED"] == 1)


@by_rows("method", description.REFUSED_METHODS)
@in_real_time
async def test_what_is_not_here_is_refused_with_what_to_do(method: str) -> None:
    counts = ServerCounts()
    async with served(Registry(), counts) as (_, client):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.ask_raw(method)
        assert status(error) == (grpc.StatusCode.UNIMPLEMENTED, description.REFUSED_METHODS[method])
        await until(lambda: counts.grpc_calls == {"UNIMPLEMENTED": 1})


@in_real_time
async def test_a_model_that_loads_or_drains_is_unavailable(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with with_model(hosts, tokenizer) as (app, _, client):
        app.registry.models["story"].refuse_new()
        assert not (await client.ask("ServerReady")).ready
        for data in (message(3, stream=False), message(3, "ensemble", stream=False)):
            with pytest.raises(grpc.aio.AioRpcError, match="model story is shutting down") as error:
                await client.infer(data)
            assert status(error)[0] is grpc.StatusCode.UNAVAILABLE
            assert ("retry-after", "1") in tuple(error.value.trailing_metadata() or ())
        app.registry.add(ServedModel("tale", "/tale"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.ask("ModelConfig", name="tale")
        assert status(error) == (grpc.StatusCode.UNAVAILABLE, "model 'tale' is not ready")
        assert ("retry-after", "10") in tuple(error.value.trailing_metadata() or ())


@in_real_time
async def test_a_server_without_models_is_not_ready() -> None:
    async with served(Registry()) as (_, client):
        assert (await client.ask("ServerLive")).live and not (await client.ask("ServerReady")).ready


@in_real_time
async def test_closing_ends_idle_streams_and_the_port(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with with_model(hosts, tokenizer) as (_, server, client):
        stream = client.stream()
        await stream.write(message(1))
        assert len([await stream.read() for _ in range(2)]) == 2
        await asyncio.wait_for(server.close(), 60)
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.ask("ServerLive")
        assert status(error)[0] is grpc.StatusCode.UNAVAILABLE
        await server.close()


def test_a_port_in_use_is_an_error_that_names_the_option() -> None:
    async def run(port: int) -> None:
        with pytest.raises(ConfigError, match=rf"triton_grpc_port={port}: .*SERVING_TRITON_GRPC_PORT"):
            GrpcServer(ServerContext(Options(host="127.0.0.1")), TRITON, port).bind()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asyncio.run(run(taken.getsockname()[1]))


@in_real_time
async def test_headers_of_a_response_are_metadata_of_its_call(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with with_model(hosts, tokenizer) as (_, __, client):
        hosts.last.limits = replace(hosts.last.limits, seeded=False)
        seeded, found = rpc.ModelInferRequest(), []
        seeded.inputs.add(name="seed", datatype="UINT64", shape=(1, 1)).contents.uint64_contents.append(1)
        seeded.inputs.add(name="top_k", datatype="INT32", shape=(1, 1)).contents.int_contents.append(5)
        for more in (b"", seeded.SerializeToString()):
            call = client.channel.unary_unary(SERVICE + "ModelInfer")(message(1, stream=False) + more, timeout=60)
            await call
            found.append([name for name, _ in await call.trailing_metadata()])
    assert found == [[], ["warning"]]


@in_real_time
async def test_a_call_that_is_cancelled_cancels_its_request(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with with_model(hosts, tokenizer) as (_, __, client):
        hosts.alone = False
        call = asyncio.ensure_future(client.infer(message(stream=False)))
        while not hosts.last.submitted:  # noqa: ASYNC110 (no event says when; the test's time limit ends it)
            await asyncio.sleep(0.001)
        call.cancel()
        while not hosts.last.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@in_real_time
async def test_a_port_is_that_of_one_server_and_messages_are_bounded() -> None:
    async with served(Registry(), max_request_size=100) as (server, client):
        with pytest.raises(ConfigError, match="cannot listen"):
            GrpcServer(ServerContext(Options(host="127.0.0.1")), TRITON, server.bound_port).bind()
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as error:
            await client.ask("ModelReady", name="x" * 200)
        assert status(error)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


@in_real_time
async def test_metadata_are_bounded_as_headers() -> None:
    async with served(Registry(), max_header_size=2048) as (_, client):
        assert (await client.ask("ServerLive")).live
        call = client.channel.unary_unary(SERVICE + "ServerLive")
        await call(b"", metadata=(("x", "a" * 1000),))
        with pytest.raises(grpc.aio.AioRpcError, match="metadata size exceeds") as error:
            await call(b"", metadata=(("x", "a" * 3000),))
        assert status(error)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


@in_real_time
async def test_connections_are_bounded_and_end_when_they_are_idle() -> None:
    async def ended(reader: asyncio.StreamReader) -> bool:
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass
        return True

    async with served(Registry(), max_connections=2, header_read_timeout=0.1) as (server, _):
        streams = [await asyncio.open_connection("127.0.0.1", server.bound_port) for _ in range(4)]
        # Two at once, because they are too many; two when nothing was said for the time of a handshake.
        assert await asyncio.wait_for(asyncio.gather(*(ended(reader) for reader, _ in streams)), 60)
        for _, writer in streams:
            writer.close()


def frame(kind: int, data: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """A frame of HTTP/2: its length, kind, flags and stream stand before the data."""
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


@in_real_time
async def test_the_client_of_an_open_stream_is_asked_whether_it_is_still_there() -> None:
    settings, headers, ping, end_of_headers = 4, 1, 6, 4
    fields = {":method": "POST", ":scheme": "http", ":path": SERVICE + "ModelStreamInfer", ":authority": "a"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    # A zero byte, then the name and the value, each behind its length: a literal field of HPACK.
    head = b"".join(b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in pair) for pair in fields.items())
    async with served(Registry(), keep_alive_timeout=0.1) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.bound_port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings) + frame(headers, head, end_of_headers, 1))
        kind = settings
        while kind != ping:
            length, kind = (await asyncio.wait_for(reader.readexactly(9), 60))[2:4]
            await reader.readexactly(length)
        writer.close()


@in_real_time
async def test_calls_are_bounded_as_connections_of_http() -> None:
    async with served(Registry(), max_connections=1) as (_, client):
        stream = client.channel.stream_stream(SERVICE + "ModelStreamInfer")()
        await stream.write(rpc.ModelInferRequest().SerializeToString())
        assert await stream.read()  # the error of an empty request
        with pytest.raises(grpc.aio.AioRpcError, match="Concurrent RPC limit exceeded") as error:
            await client.ask("ServerLive")
        assert status(error)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        stream.cancel()


class CallContext:
    """gRPC's context of a call, which keeps the error that ended it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    async def abort(self, code: grpc.StatusCode, *_: Any) -> None:
        self._code = code
        self.error = grpc.aio.AbortError()
        raise self.error

    def code(self) -> grpc.StatusCode:
        return self._code

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"

    def invocation_metadata(self) -> tuple[()]:
        return ()


def test_a_refused_call_does_not_keep_its_message() -> None:
    class Message:
        """Stands for the bytes, and for what is made of them."""

    kept: list[weakref.ref[Message]] = []

    async def refuse(request: Any, *_: Any) -> bytes:
        made = Message()
        kept.extend((weakref.ref(request), weakref.ref(made)))
        raise InvalidRequestError("no")

    server = GrpcServer(ServerContext(Options()), TRITON, 0)
    call = server._counting("ModelInfer", server._answering(refuse, None))
    context = CallContext()
    with pytest.raises(grpc.aio.AbortError):
        asyncio.run(call(Message(), context))  # type: ignore[arg-type]
    assert context.error is not None
    assert [ref() for ref in kept] == [None, None]


TABLE = """\
+------------------+---------+--------+
| Model            | Version | Status |
+------------------+---------+--------+
| ensemble         | 1       | READY  |
| postprocessing   | 1       | READY  |
| preprocessing    | 1       | READY  |
| tensorrt_llm     | 1       | READY  |
| tensorrt_llm_bls | 1       | READY  |
+------------------+---------+--------+"""


def write(directory: Path, *models: str) -> None:
    for model in models:
        (directory / model).mkdir(parents=True)
        (directory / model / "config.pbtxt").write_text("")


@in_real_time
async def test_the_port_of_grpc_answers() -> None:
    options = Options(host="127.0.0.1", triton_grpc_port=free_port())
    (server,) = bind_grpc(ServerContext(options))
    assert server.bound_port == options.triton_grpc_port
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.bound_port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
    await server.close()
    assert bind_grpc(ServerContext(Options())) == []


def test_without_grpcio_there_is_http_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bind_grpc(ServerContext(Options(triton_grpc_port=8001))) == []
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "triton_grpc_port=8001 is not served: grpcio is not installed" in record.message
    assert "pip install 'djl-trtllm[grpc]'" in record.message


def test_the_table_is_tritons(tmp_path: Path) -> None:
    write(tmp_path, "tensorrt_llm_bls", "ensemble", "tensorrt_llm", "preprocessing", "postprocessing")
    assert TRITON.ready_text(tmp_path) == TABLE


def test_other_directories_have_no_table(tmp_path: Path) -> None:
    assert TRITON.ready_text(tmp_path) == ""
    write(tmp_path, "tensorrt_llm")
    assert TRITON.ready_text(tmp_path) == ""


class Failing:
    """`parse_rpc` that raises an error, or if `begun` makes an encoder that raises it at the second chunk."""

    def __init__(self) -> None:
        self.error: BaseException
        self.begun = False

    def __call__(self, request: Any, model: ModelContext, *, streams: bool) -> Call:
        if not self.begun:
            raise self.error
        call = parse_rpc(request, model, streams=streams)
        encode, chunks = call.encoder.encode, itertools.count()

        def encoded(chunk: OutputChunk) -> bytes:
            if next(chunks):
                raise self.error
            return encode(chunk)

        call.encoder.encode = encoded  # type: ignore[method-assign]
        return call


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    made = Failing()
    monkeypatch.setattr(rpc, "parse_rpc", made)
    return made


def written(error: grpc.aio.AioRpcError) -> str:
    """Status, details and metadata."""
    metadata = "".join(f" {name}={value}" for name, value in error.trailing_metadata() or ())
    return f"{error.code().name}{metadata} {error.details()}"


async def failed(stream: Any, host: PlayedHost, begun: bool) -> Any:
    """The message of a stream that says why its request has failed; if `begun`, after a first response."""
    submitted = len(host.submitted)
    await stream.write(message(4))
    if begun:
        await within_seconds(lambda: len(host.submitted) > submitted)
        host.step()
        assert not rpc.ModelStreamInferResponse.FromString(await stream.read()).error_message
        host.step()
    return rpc.ModelStreamInferResponse.FromString(await stream.read())


async def within_seconds(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 (no event says when; the test's time limit ends it)
        await asyncio.sleep(0.001)


async def told(client: Client, host: PlayedHost, begun: bool) -> str:
    """The error of a stream. Afterwards another request is read."""
    stream = client.stream()
    for _ in range(2):
        response = await failed(stream, host, begun)
        assert (response.infer_response.id, response.infer_response.model_name) == ("7", "story")
        assert response.infer_response.parameters["triton_final_response"].bool_param
        assert not response.infer_response.outputs
    await stream.done_writing()
    assert await stream.code() is grpc.StatusCode.OK
    return str(response.error_message)


async def ended(client: Client, host: PlayedHost, begun: bool) -> str:
    """How a stream ends whose client wants the first error as its status."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await failed(client.stream(("triton_grpc_error", "true")), host, begun)
    return written(raised.value)


@in_real_time
async def test_every_error_of_the_tree(hosts: Hosts, tokenizer: Tokenizer, failing: Failing) -> None:
    async with with_model(hosts, tokenizer) as (_, __, client):
        hosts.alone = False
        calls, streams = [], []
        for name, error in every_error():
            failing.error, failing.begun = error, False
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await client.infer(message(stream=False))
            calls.append(f"  {name}: {written(raised.value)}")
            for begun in (False, True):
                failing.begun = begun
                how = "begun" if begun else "before the first response"
                texts = await told(client, hosts.last, begun), await ended(client, hosts.last, begun)
                streams.append(f"  {name}, {how}: {' | '.join(texts)}")
        lines = ["ModelInfer", *calls, "", "ModelStreamInfer: error_message | status with triton_grpc_error", *streams]
        assert not any("secret" in line for line in lines)
        check_golden("errors-TritonGrpc", ("\n".join(lines) + "\n").encode())
