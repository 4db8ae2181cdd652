from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from djl_trtllm.api.triton import protocol, refusals
from djl_trtllm.api.triton.rpc import parse_rpc
from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import Tokenizer
from djl_trtllm.server import triton_stream
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.server.triton_grpc import TritonGrpcServer
from djl_trtllm.service import Registry, ServedModel
from tests.server.application import Application, application
from tests.server.test_triton_stream import message
from tests.support.in_process import Hosts
from tests.support.virtual_time import until

SERVICE = f"/{protocol.SERVICE}/"


class Client:
    """A client of the methods, by name."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def ask(self, method: str, **fields: Any) -> Any:
        request = protocol.message(f"{method}Request")(**fields).SerializeToString()
        data = await self.channel.unary_unary(SERVICE + method)(request, timeout=60)
        return protocol.message(f"{method}Response").FromString(data)

    async def ask_raw(self, method: str) -> Any:
        return await self.channel.unary_unary(SERVICE + method)(b"", timeout=60)

    async def infer(self, data: bytes) -> Any:
        answer = await self.channel.unary_unary(SERVICE + "ModelInfer")(data, timeout=60)
        return protocol.ModelInferResponse.FromString(answer)

    def stream(self, *pairs: tuple[str, str]) -> Any:
        return self.channel.stream_stream(SERVICE + "ModelStreamInfer")(metadata=pairs, timeout=60)


@asynccontextmanager
async def served(
    registry: Registry, counts: ServerCounts | None = None, **options: Any
) -> AsyncIterator[tuple[TritonGrpcServer, Client]]:
    server = TritonGrpcServer(
        ServerContext(Options(host="127.0.0.1", **options), registry, counts=counts or ServerCounts()), 0
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.bound_port}") as channel:
        try:
            yield server, Client(channel)
        finally:
            await server.close()


def with_model(
    hosts: Hosts,
    tokenizer: Tokenizer,
    test: Callable[[Application, TritonGrpcServer, Client], Awaitable[None]],
    **options: Any,
) -> None:
    """Run a test with a model `story` whose engine generates by itself."""

    async def run() -> None:
        hosts.alone = True
        async with application(tokenizer) as app, served(app.registry, app.counts, **options) as (server, client):
            await asyncio.wait_for(test(app, server, client), 120)

    asyncio.run(run())


def status(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[Any, str | None]:
    return error.value.code(), error.value.details()


def test_what_needs_no_engine(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(app: Application, _: TritonGrpcServer, client: Client) -> None:
        assert (await client.ask("ServerLive")).live and (await client.ask("ServerReady")).ready
        assert (await client.ask("ModelReady", name="ensemble", version="1")).ready
        assert not (await client.ask("ModelReady", name="ensemble", version="2")).ready
        assert not (await client.ask("ModelReady", name="hen")).ready
        assert "statistics" in (await client.ask("ServerMetadata")).extensions
        metadata = await client.ask("ModelMetadata", name="tensorrt_llm_bls")
        assert (metadata.name, len(metadata.inputs), metadata.versions) == ("tensorrt_llm_bls", 40, ["1"])
        config = (await client.ask("ModelConfig", name="story")).config
        assert config.name == "story"
        assert config.max_batch_size == app.registry.models["story"].model.options.max_rolling_batch_size
        (model,) = (await client.ask("ModelStatistics")).model_stats
        assert (model.name, model.inference_stats.success.count) == ("story", 0)
        (model,) = (await client.ask("ModelStatistics", name="ensemble")).model_stats
        assert model.name == "ensemble"
        index = (await client.ask("RepositoryIndex", ready=True)).models
        assert {each.name: each.state for each in index}["ensemble"] == "READY"

    with_model(hosts, tokenizer, test)


def test_generating(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(_: Application, __: TritonGrpcServer, client: Client) -> None:
        assert len((await client.infer(message(3, stream=False))).outputs) == 3
        stream = client.stream()
        await stream.write(message(2))
        await stream.done_writing()
        responses = [protocol.ModelStreamInferResponse.FromString(data) async for data in stream]
        assert len(responses) >= 2 and not any(response.error_message for response in responses)
        assert await stream.code() is grpc.StatusCode.OK

    with_model(hosts, tokenizer, test)


def test_messages_that_are_large_are_bounded_and_read_beside_the_event_loop(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noting(*arguments: Any, **keywords: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse_rpc(*arguments, **keywords)

    monkeypatch.setattr(triton_stream, "parse_rpc", noting)

    async def test(app: Application, server: TritonGrpcServer, client: Client) -> None:
        for size, status_code in ((0, None), (100_000, None), (600_000, grpc.StatusCode.UNAVAILABLE)):
            padding = protocol.ModelInferRequest(outputs=[{"name": "text_output"}]).SerializeToString()
            data = message(1, stream=False) + b"\xfa\x07" + varint(size) + bytes(size) + padding
            if status_code is None:
                await client.infer(data)
                continue
            with pytest.raises(grpc.aio.AioRpcError, match="max_body_memory=1000000") as refused:
                await client.infer(data)
            assert refused.value.code() is status_code
        assert [name.startswith("work-") for name in threads] == [False, True]
        assert server._shared.bodies.used == 0
        many = b"\x2a\x00" * 20_000
        with pytest.raises(grpc.aio.AioRpcError, match="too many fields") as refused:
            await client.infer(many)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="expected at most 32768") as refused:
            await client.channel.unary_unary(SERVICE + "ServerLive")(bytes(32_769), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    with_model(hosts, tokenizer, test, max_body_memory=1_000_000)


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128, number >> 7 & 127 | 128, number >> 14])


def test_calls_are_counted_by_their_status(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(app: Application, _: TritonGrpcServer, client: Client) -> None:
        await client.ask("ServerLive")
        await client.infer(message(3, stream=False))
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

    with_model(hosts, tokenizer, test)


@pytest.mark.parametrize("method", refusals.METHODS)
def test_what_is_not_here_is_refused_with_what_to_do(method: str) -> None:
    async def run() -> None:
        counts = ServerCounts()
        async with served(Registry(), counts) as (_, client):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.ask_raw(method)
            assert status(error) == (grpc.StatusCode.UNIMPLEMENTED, refusals.METHODS[method])
            await until(lambda: counts.grpc_calls == {"UNIMPLEMENTED": 1})

    asyncio.run(run())


@pytest.mark.parametrize("method", ["ModelMetadata", "ModelConfig", "ModelStatistics"])
def test_errors_of_what_needs_no_engine(hosts: Hosts, tokenizer: Tokenizer, method: str) -> None:
    async def test(_: Application, __: TritonGrpcServer, client: Client) -> None:
        for fields in ({"name": "hen"}, {"name": "story", "version": "2"}):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.ask(method, **fields)
            assert status(error)[0] is grpc.StatusCode.NOT_FOUND
        if method != "ModelStatistics":
            with pytest.raises(grpc.aio.AioRpcError, match="takes no requests") as error:
                await client.ask(method, name="preprocessing")
            assert status(error)[0] is grpc.StatusCode.INVALID_ARGUMENT

    with_model(hosts, tokenizer, test)


def test_a_model_that_loads_or_drains_is_unavailable(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(app: Application, _: TritonGrpcServer, client: Client) -> None:
        app.registry.models["story"].refuse_new()
        assert not (await client.ask("ServerReady")).ready
        for data in (message(3, stream=False), message(3, "ensemble", stream=False)):
            with pytest.raises(grpc.aio.AioRpcError, match="model story is shutting down") as error:
                await client.infer(data)
            assert status(error)[0] is grpc.StatusCode.UNAVAILABLE
        app.registry.add(ServedModel("tale", "/tale"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.ask("ModelConfig", name="tale")
        assert status(error) == (grpc.StatusCode.UNAVAILABLE, "model 'tale' is not ready")
        assert ("retry-after", "10") in tuple(error.value.trailing_metadata() or ())

    with_model(hosts, tokenizer, test)


def test_a_server_without_models_is_not_ready() -> None:
    async def run() -> None:
        async with served(Registry()) as (_, client):
            assert (await client.ask("ServerLive")).live and not (await client.ask("ServerReady")).ready

    asyncio.run(run())


def test_a_defect_is_reported_without_its_message(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("secret")

    async def test(_: Application, __: TritonGrpcServer, client: Client) -> None:
        monkeypatch.setattr("djl_trtllm.server.triton_stream.parse_rpc", broken)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.infer(message(stream=False))
        assert status(error) == (grpc.StatusCode.INTERNAL, "Internal server error, see the server's log.")

    with_model(hosts, tokenizer, test)
    assert "ValueError: secret" in caplog.text


def test_the_first_error_is_the_status_of_a_stream_that_asks_for_it(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(_: Application, __: TritonGrpcServer, client: Client) -> None:
        stream = client.stream(("triton_grpc_error", "true"))
        await stream.write(message(name="hen"))
        with pytest.raises(grpc.aio.AioRpcError, match="no model named 'hen'"):
            await stream.read()
        assert await stream.code() is grpc.StatusCode.NOT_FOUND
        other = client.stream(("triton_grpc_error", "false"))
        await other.write(message(name="hen"))
        assert "no model named 'hen'" in protocol.ModelStreamInferResponse.FromString(await other.read()).error_message

    with_model(hosts, tokenizer, test)


def test_closing_ends_idle_streams_and_the_port(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(_: Application, server: TritonGrpcServer, client: Client) -> None:
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

    with_model(hosts, tokenizer, test)


def test_a_port_in_use_is_an_error_that_names_the_option() -> None:
    async def run(port: int) -> None:
        with pytest.raises(ConfigError, match=rf"triton_grpc_port={port}: .*SERVING_TRITON_GRPC_PORT"):
            await TritonGrpcServer(ServerContext(Options(host="127.0.0.1")), port).start()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asyncio.run(run(taken.getsockname()[1]))


def test_a_call_that_is_cancelled_cancels_its_request(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(_: Application, __: TritonGrpcServer, client: Client) -> None:
        hosts.alone = False
        call = asyncio.ensure_future(client.infer(message(stream=False)))
        while not hosts.last.submitted:  # noqa: ASYNC110 (no event says when; the test's time limit ends it)
            await asyncio.sleep(0.001)
        call.cancel()
        while not hosts.last.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    with_model(hosts, tokenizer, test)


def test_one_model_that_loads_is_not_described_and_the_server_is_not_ready(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(app: Application, _: TritonGrpcServer, client: Client) -> None:
        app.registry.add(ServedModel("tale", "/tale"))
        assert not (await client.ask("ServerReady")).ready
        for method in ("ModelMetadata", "ModelConfig"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.ask(method, name="tale")
            assert status(error) == (grpc.StatusCode.UNAVAILABLE, "model 'tale' is not ready")

    with_model(hosts, tokenizer, test)


def test_a_server_that_does_not_listen_has_no_port() -> None:
    assert TritonGrpcServer(ServerContext(Options()), 8001).bound_port == 0


def test_a_port_is_that_of_one_server_and_messages_are_bounded() -> None:
    async def run() -> None:
        async with served(Registry(), max_request_size=100) as (server, client):
            with pytest.raises(ConfigError, match="cannot listen"):
                await TritonGrpcServer(ServerContext(Options(host="127.0.0.1")), server.bound_port).start()
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as error:
                await client.ask("ModelReady", name="x" * 200)
            assert status(error)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(run())


def test_metadata_are_bounded_as_headers() -> None:
    async def run() -> None:
        async with served(Registry(), max_header_size=2048) as (_, client):
            assert (await client.ask("ServerLive")).live
            call = client.channel.unary_unary(SERVICE + "ServerLive")
            await call(b"", metadata=(("x", "a" * 1000),))
            with pytest.raises(grpc.aio.AioRpcError, match="metadata size exceeds") as error:
                await call(b"", metadata=(("x", "a" * 3000),))
            assert status(error)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(run())


def test_connections_are_bounded_and_end_when_they_are_idle() -> None:
    async def ended(reader: asyncio.StreamReader) -> bool:
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass
        return True

    async def run() -> None:
        async with served(Registry(), max_connections=2, header_read_timeout=0.1) as (server, _):
            streams = [await asyncio.open_connection("127.0.0.1", server.bound_port) for _ in range(4)]
            # Two at once, because they are too many; two when nothing was said for the time of a handshake.
            assert await asyncio.wait_for(asyncio.gather(*(ended(reader) for reader, _ in streams)), 60)
            for _, writer in streams:
                writer.close()

    asyncio.run(run())


def test_calls_are_bounded_as_connections_of_http() -> None:
    async def run() -> None:
        async with served(Registry(), max_connections=1) as (_, client):
            stream = client.channel.stream_stream(SERVICE + "ModelStreamInfer")()
            await stream.write(protocol.ModelInferRequest().SerializeToString())
            assert await stream.read()  # the error of an empty request
            with pytest.raises(grpc.aio.AioRpcError, match="Concurrent RPC limit exceeded") as error:
                await client.ask("ServerLive")
            assert status(error)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            stream.cancel()

    asyncio.run(run())
