"""Tensors over gRPC that are nearly right: each gets Triton's status, or in a stream its message."""

from __future__ import annotations

import struct
from typing import Any

import grpc
import pytest

from djl_trtllm.api.triton.protocol import ModelInferRequest, ModelStreamInferResponse
from djl_trtllm.model import Tokenizer
from tests.server.test_triton_grpc import with_model
from tests.support.in_process import PROMPT, Hosts

TEXT = struct.pack("<I", len(PROMPT)) + PROMPT.encode()
COUNT = struct.pack("<i", 2)


def message(
    text: bytes = TEXT, count: bytes = COUNT, shape: Any = (1, 1), datatype: str = "INT32", extra: bytes | None = None
) -> Any:
    made = ModelInferRequest(model_name="ensemble", id="7")
    made.inputs.add(name="text_input", datatype="BYTES", shape=(1, 1))
    made.inputs.add(name="max_tokens", datatype=datatype, shape=shape)
    made.raw_input_contents.extend([text, count, *([] if extra is None else [extra])])
    return made


def with_input(name: str, datatype: str, raw: bytes) -> Any:
    made = message(extra=raw)
    made.inputs.add(name=name, datatype=datatype, shape=(1, 1))
    return made


MALFORMED = {
    "no bytes": message(b""),
    "cut text": message(TEXT[:-1]),
    "more than the text": message(TEXT + b"x"),
    "a huge length": message(b"\xff\xff\xff\xff" + TEXT[4:]),
    "not UTF-8": message(TEXT[:4] + b"\xff" * len(PROMPT)),
    "three bytes": message(count=COUNT[:3]),
    "five bytes": message(count=COUNT + b"\0"),
    "no dimension": message(shape=()),
    "one dimension": message(shape=(1,)),
    "two rows": message(shape=(2, 1), count=COUNT * 2),
    "a negative dimension": message(shape=(-1, 1)),
    "huge dimensions": message(shape=(2**31 - 1, 2**31 - 1)),
    "larger ones": message(shape=(2**62, 4)),
    "a thousand dimensions": message(shape=(1,) * 1000),
    "an unknown datatype": message(datatype="INT33"),
    "another datatype": message(datatype="BYTES"),
    "a tensor too many": message(extra=b""),
    "a negative count": message(count=struct.pack("<i", -1)),
    "no number": with_input("temperature", "FP32", struct.pack("<f", float("nan"))),
    "an infinite number": with_input("temperature", "FP64", struct.pack("<d", float("inf"))),
    "deep JSON as a guide": with_input("guided_decoding_guide", "BYTES", struct.pack("<I", 900) + b"[" * 900),
}


def test_each_gets_its_status_and_the_server_goes_on(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async def test(_: Any, __: Any, client: Any) -> None:
        stream = client.stream()
        for name, made in MALFORMED.items():
            data = made.SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await client.infer(data)
            assert (name, raised.value.code()) == (name, grpc.StatusCode.INVALID_ARGUMENT)
            await stream.write(data)
            response = ModelStreamInferResponse.FromString(await stream.read())
            assert response.error_message == raised.value.details() != ""
            assert response.infer_response.id == "7"
        assert (await client.infer(message().SerializeToString())).outputs
        await stream.write(message().SerializeToString())
        assert ModelStreamInferResponse.FromString(await stream.read()).infer_response.outputs
        await stream.done_writing()

    with_model(hosts, tokenizer, test)
