"""What every error of the tree is in every dialect: status, headers and body, and the last bytes of a stream.

The tables are in `golden/errors-DIALECT.txt`; UPDATE_GOLDEN=1 writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from djl_trtllm.api import Call, Dialect, ModelContext, Prompt, RawRequest
from djl_trtllm.api.front_end import endpoint_error
from djl_trtllm.api.kept import Kept
from djl_trtllm.api.openapi import describe, request_errors
from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    ConfigError,
    DjlTrtllmError,
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    RequestError,
)
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.scripts import check_golden
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.steps import Delta
from tests.support.virtual_time import in_virtual_time, until

STREAMS = [
    pytest.param(dialect, path, id=f"{type(dialect).__name__}-{path}")
    for dialect in DIALECTS
    for path in dialect.paths
    if describe(dialect, path).example is not None
]
# A response has these ids and times, which are other ones every time.
CHANGING = re.compile(rb'[0-9a-f]{32}|(?<="created":)\d+|(?<="created_at":)\d+')


def errors() -> Iterator[tuple[str, BaseException]]:
    """Each error with its name: those of the tree, ones without their further members, and a defect."""
    seen: set[str] = set()
    for error in request_errors():
        # Of the two messages, the first.
        name = type(error).__name__ + (" without a name" if getattr(error, "name", "") is None else "")
        if name not in seen:
            seen.add(name)
            yield name, error
    yield "NotReadyError without a time", NotReadyError("message")
    yield "KeyError", KeyError("secret")


def body(dialect: Dialect, path: str) -> bytes:
    """The example of a path, as a stream where the body says so."""
    example = dict(describe(dialect, path).example)
    if any("stream" in table.schema()["properties"] for table in dialect.tables.get(path, ())):
        example["stream"] = True
    return orjson.dumps(example)


def streamed(dialect: Dialect, path: str, tokenizer: Tokenizer) -> Call | None:
    """The call of a stream that has its first token; None if the path has no streams."""
    model = SimpleNamespace(name="story", options=Options(), tokenizer=tokenizer, custom=None, kept=Kept())
    parameters = {"model": "story", "version": "1", "endpoint": "story"}
    try:
        call = dialect.parse(RawRequest(body(dialect, path), {}, path, parameters), cast(ModelContext, model))
    except InvalidRequestError:
        return None
    call.encoder.begin(Prompt("The wolf", 3))
    if not call.encoder.stream:
        return None
    call.encoder.encode(OutputChunk(0, [Token(5, " said", -0.5, False)], None))
    return call


def replies(dialect: Dialect, *, endpoint: bool = False) -> Iterator[str]:
    """A line for each error."""
    for name, error in errors():
        reply = dialect.encode_error(error, Options())
        if endpoint:
            reply = endpoint_error(error, reply)
        assert 400 <= reply.status <= 599
        assert b"secret" not in reply.body
        headers = "".join(f" {key}={value}" for key, value in reply.headers)
        yield f"  {name}: {reply.status}{headers} {' '.join(reply.body.decode().split())}"


def written(data: bytes) -> str:
    """Readable, with what is binary in AWS's event stream as escapes."""
    return repr(CHANGING.sub(b"...", data).decode(errors="backslashreplace"))[1:-1]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: type(dialect).__name__)
def test_every_error_of_the_tree_in_every_dialect(dialect: Dialect, tokenizer: Tokenizer) -> None:
    lines = ["Replies before the first byte", *replies(dialect)]
    if dialect.sagemaker:
        lines += ["", "Replies on SageMaker's paths", *replies(dialect, endpoint=True)]
    ends: dict[str, list[str]] = {}
    for path in dialect.paths:
        if describe(dialect, path).example is None or streamed(dialect, path, tokenizer) is None:
            continue
        table: dict[str, list[str]] = {}
        for name, error in errors():
            if isinstance(error, RequestError):
                call = streamed(dialect, path, tokenizer)
                assert call is not None
                table.setdefault(written(call.encoder.error(error)), []).append(name)
        text = "\n".join(f"  {', '.join(names)}: {data or 'the body has no end'}" for data, names in table.items())
        ends.setdefault(text, []).append(path)
    for text, paths in ends.items():
        lines += ["", f"Last bytes of a stream that has begun: {', '.join(paths)}", text]
    check_golden(f"errors-{type(dialect).__name__}", ("\n".join(lines) + "\n").encode())


@pytest.mark.parametrize(("dialect", "path"), STREAMS)
def test_an_error_that_comes_with_a_chunk_is_that_of_error(dialect: Dialect, path: str, tokenizer: Tokenizer) -> None:
    error = GenerationError("broken")
    one, other = streamed(dialect, path, tokenizer), streamed(dialect, path, tokenizer)
    if one is None or other is None:
        return
    chunk = OutputChunk(0, [], SequenceResult(FinishReason.ERROR, 1, None, None, error=error))
    try:
        data = one.encoder.encode(chunk)
    except GenerationError as raised:
        # The caller asks for the last bytes.
        assert raised is error
    else:
        assert CHANGING.sub(b"", data) == CHANGING.sub(b"", other.encoder.error(error))


@pytest.mark.parametrize(("dialect", "path"), STREAMS)
@in_virtual_time
async def test_a_stream_that_has_begun_receives_the_error_or_has_no_end(
    dialect: Dialect, path: str, hosts: Hosts, tokenizer: Tokenizer
) -> None:
    if streamed(dialect, path, tokenizer) is None:
        return
    async with application(tokenizer) as served:
        target = path.replace("{version}", "1")
        target = re.sub(r"\{\w+\}", "story", target)
        stream = served.client.begin("POST", target, body(dialect, path))
        await until(lambda: bool(hosts.last.submitted))
        for _ in range(3):
            hosts.last.step()
        begun = bool(stream.parts)
        hosts.last.send(Delta(hosts.last.submitted[0].request_id, [], None, FinishReason.ERROR, error="broken"))
        await stream.end()
        if not begun:
            expected = dialect.encode_error(GenerationError("broken"), Options())
            assert stream.status == expected.status or dialect.sagemaker
            assert b"broken" in stream.body and stream.complete
        elif stream.complete:
            assert stream.status == 200 and b"broken" in stream.body
        else:
            # Raw text cannot express it.
            assert stream.status == 200 and b"broken" not in stream.body


def everything_below(kind: type[DjlTrtllmError]) -> Iterator[type[DjlTrtllmError]]:
    for each in kind.__subclasses__():
        yield each
        yield from everything_below(each)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: type(dialect).__name__)
def test_what_is_no_error_of_a_request_is_a_defect_whose_message_is_not_sent(dialect: Dialect) -> None:
    defect = dialect.encode_error(KeyError("secret"), Options())
    tabled = {type(error) for _, error in errors()}
    for kind in everything_below(DjlTrtllmError):
        if kind.__module__ != DjlTrtllmError.__module__ or kind is RequestError:
            continue
        if issubclass(kind, RequestError):
            assert kind in tabled
        else:
            error = ConfigError(["secret"]) if kind is ConfigError else kind("secret")
            assert dialect.encode_error(error, Options()) == defect


def test_headers_of_a_table_are_those_of_every_dialect(tokenizer: Tokenizer) -> None:
    for dialect in DIALECTS:
        for _, error in errors():
            headers: dict[str, Any] = dict(dialect.encode_error(error, Options()).headers)
            wanted = getattr(error, "retry_after", None)
            assert headers.get("Retry-After") == (None if wanted is None else str(wanted)), (dialect, error)
            assert headers.get("Allow") == getattr(error, "allow", None)
