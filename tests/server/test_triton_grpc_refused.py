"""What a gRPC call that is refused leaves behind."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import grpc
import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.triton_grpc import TritonGrpcServer


class Call:
    """gRPC's context of a call, which keeps the error that ended it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    async def abort(self, code: grpc.StatusCode, *_: Any) -> None:
        self._code = code
        self.error = grpc.aio.AbortError()
        raise self.error

    def code(self) -> grpc.StatusCode:
        return self._code

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

    server = TritonGrpcServer(ServerContext(Options()), 0)
    call = server._counting("ModelInfer", server._answering(refuse, None))
    context = Call()
    with pytest.raises(grpc.aio.AbortError):
        asyncio.run(call(Message(), context))  # type: ignore[arg-type]
    assert context.error is not None
    assert [ref() for ref in kept] == [None, None]
