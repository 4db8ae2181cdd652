"""What every error of the tree is over gRPC: status, details and metadata of a call, and the last message of a stream.

The table is `tests/api/golden/errors-TritonGrpc.txt`; UPDATE_GOLDEN=1 writes it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from djl_trtllm.api import Call, ModelContext
from djl_trtllm.api.triton import protocol
from djl_trtllm.api.triton.rpc import parse_rpc
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, OutputChunk
from djl_trtllm.server import triton_stream
from tests.api.scripts import check_golden
from tests.api.test_registry_errors import errors
from tests.server.application import Application
from tests.server.test_triton_grpc import Client, with_model
from tests.server.test_triton_stream import message
from tests.support.in_process import Hosts, PlayedHost


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
    monkeypatch.setattr(triton_stream, "parse_rpc", made)
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
        assert not protocol.ModelStreamInferResponse.FromString(await stream.read()).error_message
        host.step()
    return protocol.ModelStreamInferResponse.FromString(await stream.read())


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


def test_every_error_of_the_tree(hosts: Hosts, tokenizer: Tokenizer, failing: Failing) -> None:
    async def test(_: Application, __: Any, client: Client) -> None:
        hosts.alone = False
        calls, streams = [], []
        for name, error in errors():
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

    with_model(hosts, tokenizer, test)


def test_an_error_of_the_engine_is_the_calls_status(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(_: Application, __: Any, client: Client) -> None:
        hosts.alone = False
        call = asyncio.ensure_future(client.infer(message(stream=False)))
        await within_seconds(lambda: hosts.last.submitted)
        hosts.last.send(Delta(hosts.last.submitted[0].request_id, [], None, FinishReason.ERROR, error="it broke"))
        with pytest.raises(grpc.aio.AioRpcError, match="it broke") as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.INTERNAL

    with_model(hosts, tokenizer, test)
