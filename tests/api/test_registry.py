"""Every dialect that is registered, one that a test registers, and every error in every dialect."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import orjson
import pytest

from djl_trtllm.api.base import Call, Dialect, ModelContext, Prompt, RawRequest
from djl_trtllm.api.front_end import endpoint_error
from djl_trtllm.api.kept import Kept
from djl_trtllm.api.openapi import describe, request_errors
from djl_trtllm.api.registry import DEFAULT, DIALECTS
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
from djl_trtllm.service.lifecycle import ServedModel
from tests.api.models import check_golden
from tests.server.application import application, body
from tests.support.in_process import Hosts
from tests.support.plugin import TRIAL, installed
from tests.support.steps import Delta
from tests.support.tables import by_rows, by_table
from tests.support.virtual_time import in_virtual_time, until

PROMPTS = b"the wolf\nthe little red riding hood\n"


@pytest.fixture
def registered() -> Iterator[None]:
    """The trial dialect has its line."""
    DIALECTS.append(TRIAL)
    yield
    DIALECTS.remove(TRIAL)


# -- all dialects ------------------------------------------------------------------------------------------------------


@by_table("path", "content", apart=True)
@in_virtual_time
async def test_a_client_that_leaves_cancels(hosts: Hosts, tokenizer: Tokenizer, path: str, content: bytes) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", path, content)
        await until(lambda: bool(hosts.last.submitted))
        stream.leave()
        await stream.end()
        assert hosts.last.cancelled == [hosts.last.submitted[0].request_id]


@by_table("point", "said")
def test_an_installed_package_adds_its_dialect_or_is_named(tmp_path: Path, point: str, said: str) -> None:
    program = "from djl_trtllm.api.registry import DIALECTS; print(DIALECTS[-1].name.upper())"
    environment = os.environ | installed(tmp_path, "djl_trtllm.dialects", f"mine = {point}")
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert re.search(said, ended.stdout + ended.stderr, re.DOTALL)


def test_every_path_belongs_to_one_dialect() -> None:
    posted = [path for dialect in DIALECTS for path in (*dialect.paths, *dialect.actions)]
    pages = [path for dialect in DIALECTS for path in dialect.pages]
    assert len(set(posted)) == len(posted) and len(set(pages)) == len(pages)
    assert all(dialect.paths for dialect in DIALECTS)
    assert DEFAULT in DIALECTS


# -- one that is registered --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
@in_virtual_time
async def test_a_dialect_with_its_line_is_served_beside_the_others(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        answer = await served.client.post("/trial", PROMPTS, {"tokens": "2"})
        assert (answer.status, answer.headers["content-type"], answer.headers["x-prompts"]) == (200, "text/lines", "2")
        assert answer.body.splitlines() == [line(tokenizer, prompt) for prompt in PROMPTS.decode().splitlines()]
        assert (await served.client.post("/invocations", body())).status == 200
        assert (await served.client.get("/trial")).status == 405


@pytest.mark.usefixtures("registered")
@in_virtual_time
async def test_a_stream_has_the_chunks_of_all_prompts_and_a_client_that_leaves_ends_them(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/trial/story/stream", PROMPTS)
        await until(lambda: len(hosts.last.submitted) == 2)
        hosts.last.step()
        assert [part[:1] for part in stream.parts] == [b"0", b"1"]
        hosts.last.send(Delta(1, [5], None, FinishReason.LENGTH))
        assert not stream.complete
        hosts.last.send(Delta(0, [5], None, FinishReason.LENGTH))
        await stream.end()
        assert ([part[:1] for part in stream.parts], stream.complete) == ([b"0", b"1", b"1", b"0"], True)
        left = served.client.begin("POST", "/trial/story/stream", PROMPTS)
        await until(lambda: len(hosts.last.submitted) == 4)
        left.leave()
        await left.end()
        assert sorted(hosts.last.cancelled) == [submitted.request_id for submitted in hosts.last.submitted[2:]]
        hosts.last.step()
        assert served.registry.models["story"].workers[0].load_now == 0


@pytest.mark.usefixtures("registered")
@in_virtual_time
async def test_errors_are_in_the_format_of_their_dialect(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, max_rolling_batch_size=1, job_queue_size=1) as served:
        answer = await served.client.post("/trial", b"")
        assert (answer.status, answer.body) == (400, b"! no prompts for story\n")
        answer = await served.client.post("/trial", b"a\nb\nc")
        assert (answer.status, answer.headers["content-type"]) == (400, "text/plain")
        waiting = served.client.begin("POST", "/trial", b"the wolf")
        await until(lambda: bool(hosts.last.submitted))
        answer = await served.client.post("/trial", PROMPTS)
        assert (answer.status, answer.body[:2], len(hosts.last.submitted)) == (503, b"! ", 1)
        hosts.last.send(Delta(0, [], None, FinishReason.ERROR, error="broken"))
        await waiting.end()
        assert (waiting.status, waiting.body) == (500, b"! broken\n")
        served.registry.models["story"].refuse_new()
        assert (await served.client.post("/trial", PROMPTS)).status == 529  # wlm_error_http_code


@pytest.mark.usefixtures("registered")
@in_virtual_time
async def test_an_error_in_a_stream_is_that_of_its_prompt(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/trial/story/stream", PROMPTS)
        await until(lambda: len(hosts.last.submitted) == 2)
        hosts.last.step()
        hosts.last.send(Delta(1, [], None, FinishReason.ERROR, error="broken"))
        await asyncio.sleep(0)
        assert (stream.parts[-1], stream.complete) == (b"! broken\n", False)
        hosts.last.send(Delta(0, [5], None, FinishReason.LENGTH))
        await stream.end()
        assert stream.complete


@pytest.mark.usefixtures("registered")
@in_virtual_time
async def test_a_dialect_may_find_the_models_name_in_the_request(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        await served.load(tokenizer, "fable")
        answer = await served.client.post("/trial", PROMPTS, {"x-model": "fable"})
        assert (answer.status, hosts.made[0].submitted, len(hosts.made[1].submitted)) == (200, [], 2)
        answer = await served.client.post("/trial", PROMPTS, {"x-model": "fable", "model_name": "story"})
        assert (answer.status, len(hosts.made[0].submitted)) == (200, 2)
        assert (await served.client.post("/trial", PROMPTS, {"x-model": "hen"})).status == 404
        answer = await served.client.post("/trial", PROMPTS, {})
        assert (answer.status, answer.body[:40]) == (404, b"! Parameter model_name is required; load")
        assert (await served.client.post("/trial", b"x" * 1001, {"x-model": "hen"})).status == 413


@pytest.mark.usefixtures("registered")
@in_virtual_time
async def test_a_dialect_has_pages_of_all_models_and_of_one(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, tgi_compat=True) as served:
        served.registry.add(ServedModel("fable", "/fable"))
        answer = await served.client.get("/trial/models")
        assert (answer.status, answer.body) == (200, b"story True\nfable -\n")
        assert (await served.client.get("/trial/models/fable")).body == b"fable -\n"
        assert (await served.client.get("/trial/models/hen")).status == 404
        answer = await served.client.post("/trial/models")
        assert (answer.status, answer.body[:1], answer.headers["content-type"]) == (405, b"!", "text/plain")


@pytest.mark.usefixtures("registered")
@in_virtual_time
async def test_a_dialect_has_actions_on_all_models_and_on_one(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        await served.load(tokenizer, "fable")
        count = len(tokenizer.encode("the wolf"))
        answer = await served.client.post("/trial/count", b"the wolf")
        assert (answer.status, answer.body.decode()) == (200, f"story {count}\nfable {count}\n")
        assert (await served.client.post("/trial/count", b"the wolf", {"x-model": "fable"})).body[:6] == b"fable "
        assert (await served.client.post("/trial/story/count", b"the wolf")).body[:6] == b"story "
        answer = await served.client.post("/trial/count", b"the wolf", {"x-model": "hen"}, "model_name=fable")
        assert answer.body[:6] == b"fable "
        answer = await served.client.post("/trial/hen/count", b"the wolf")
        assert (answer.status, answer.body[:28]) == (404, b"! there is no model named 'h")
        assert (await served.client.post("/trial/count", b"")).status == 400
        assert (await served.client.get("/trial/count")).status == 405


@pytest.mark.usefixtures("registered")
@in_virtual_time
async def test_a_dialects_alias_means_the_only_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        assert (await served.client.post("/trial/default/stream", PROMPTS)).status == 200
        assert (await served.client.post("/trial/default/count", PROMPTS)).body[:6] == b"story "
        await served.load(tokenizer, "fable")
        assert (await served.client.post("/trial/default/stream", PROMPTS)).status == 404


def line(tokenizer: Tokenizer, prompt: str) -> bytes:
    """What the trial dialect makes of a prompt whose first two tokens are generated again."""
    ids = tokenizer.encode(prompt)
    return f"{prompt} ({len(ids)}) ->{tokenizer.decode(ids[:2])}".encode()


STREAMS = [
    pytest.param(dialect, path, id=f"{type(dialect).__name__}-{path}")
    for dialect in DIALECTS
    for path in dialect.paths
    if describe(dialect, path).example is not None
]
# A response has these ids and times, which are other ones every time.
CHANGING = re.compile(rb'[0-9a-f]{32}|(?<="created":)\d+|(?<="created_at":)\d+')


def every_error() -> Iterator[tuple[str, BaseException]]:
    """Each error with its name: those of the tree, ones without their further members, and a defect."""
    seen: set[str] = set()
    for error in request_errors():
        # Some errors have two messages: the first one is taken.
        name = type(error).__name__ + (" without a name" if getattr(error, "name", "") is None else "")
        if name not in seen:
            seen.add(name)
            yield name, error
    yield "NotReadyError without a time", NotReadyError("message")
    yield "KeyError", KeyError("secret")


def example_body(dialect: Dialect, path: str) -> bytes:
    """The example of a path, as a stream where the body says so."""
    example = dict(describe(dialect, path).example)
    if any("stream" in table.schema()["properties"] for table in dialect.tables.get(path, ())):
        example["stream"] = True
    return orjson.dumps(example)


def streamed(dialect: Dialect, path: str, tokenizer: Tokenizer) -> Call | None:
    """The call of a stream that has its first token; None if the path has no streams."""
    model = SimpleNamespace(name="story", options=Options(), tokenizer=tokenizer, custom=None, kept=Kept(Options()))
    parameters = {"model": "story", "version": "1", "endpoint": "story"}
    try:
        call = dialect.parse(RawRequest(example_body(dialect, path), {}, path, parameters), cast(ModelContext, model))
    except InvalidRequestError:
        return None
    call.encoder.begin(Prompt("The wolf", 3))
    if not call.encoder.stream:
        return None
    call.encoder.encode(OutputChunk(0, [Token(5, " said", -0.5, False)], None))
    return call


def replies(dialect: Dialect, *, endpoint: bool = False) -> Iterator[str]:
    """A line for each error."""
    for name, error in every_error():
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


@by_rows("dialect", DIALECTS)
def test_every_error_of_the_tree_in_every_dialect(dialect: Dialect, tokenizer: Tokenizer) -> None:
    lines = ["Replies before the first byte", *replies(dialect)]
    if dialect.sagemaker:
        lines += ["", "Replies on SageMaker's paths", *replies(dialect, endpoint=True)]
    ends: dict[str, list[str]] = {}
    for path in dialect.paths:
        if describe(dialect, path).example is None or streamed(dialect, path, tokenizer) is None:
            continue
        table: dict[str, list[str]] = {}
        for name, error in every_error():
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
        stream = served.client.begin("POST", target, example_body(dialect, path))
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


@by_rows("dialect", DIALECTS)
def test_what_is_no_error_of_a_request_is_a_defect_whose_message_is_not_sent(dialect: Dialect) -> None:
    defect = dialect.encode_error(KeyError("secret"), Options())
    tabled = {type(error) for _, error in every_error()}
    for kind in everything_below(DjlTrtllmError):
        if kind.__module__ != DjlTrtllmError.__module__ or kind is RequestError:
            continue
        if issubclass(kind, RequestError):
            assert kind in tabled
        else:
            error = ConfigError(["secret"]) if kind is ConfigError else kind("secret")
            assert dialect.encode_error(error, Options()) == defect
