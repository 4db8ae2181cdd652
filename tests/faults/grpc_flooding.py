"""Clients of Triton's gRPC that send what is refused, and clients that open streams and read nothing."""

from __future__ import annotations

import asyncio
import collections
import struct

import grpc

from djl_trtllm.api.triton.protocol import SERVICE, ModelInferRequest

_HELD_SECONDS = 5
_REQUESTS = 50
"""In one stream."""
# Otherwise all clients of the process share a connection.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


def _infer(text: str, tokens: int = 1, *, inputs: int = 0) -> bytes:
    """A message with a prompt, and with `inputs` that nobody knows."""
    message = ModelInferRequest(model_name="ensemble")
    given = [("text_input", "BYTES", struct.pack("<I", len(text)) + text.encode())]
    given += [("max_tokens", "INT32", struct.pack("<i", tokens)), ("stream", "BOOL", b"\1")]
    given += [(f"input{number}", "INT32", bytes(4)) for number in range(inputs)]
    for name, datatype, data in given:
        message.inputs.add(name=name, datatype=datatype).shape.extend((1, 1))
        message.raw_input_contents.append(data)
    made: bytes = message.SerializeToString()
    return made


async def call(port: int, count: collections.Counter[str]) -> None:
    """Refused calls, one after the other."""
    messages = (b"\xff" * 1_000_000, _infer("wolf", inputs=20_000), _infer("wolf " * 1_000_000))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        for message in messages:
            try:
                await channel.unary_unary(f"/{SERVICE}/ModelInfer")(message)
                count["OK"] += 1
            except grpc.aio.AioRpcError as error:
                count[error.code().name] += 1


async def open_stream(port: int, count: collections.Counter[str]) -> None:
    """Streams of many tokens that nobody reads."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
        try:
            for _ in range(_REQUESTS):
                await stream.write(_infer("the wolf", 300))
            count["held"] += 1
            await asyncio.sleep(_HELD_SECONDS)
        except grpc.aio.AioRpcError as error:
            count[error.code().name] += 1
        except asyncio.InvalidStateError:
            count["closed"] += 1
