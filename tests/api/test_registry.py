"""Every dialect that is registered, and one that a test registers: nothing else is needed to serve it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm import errors
from djl_trtllm.api import Dialect, RawRequest
from djl_trtllm.api.registry import DEFAULT, DIALECTS
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    MethodNotAllowedError,
    OverloadedError,
    RequestError,
    TooManyRequestsError,
    UnknownModelError,
)
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.service.lifecycle import ServedModel
from tests.server.application import application, body
from tests.support.in_process import Hosts
from tests.support.plugin import TRIAL, installed
from tests.support.steps import Delta
from tests.support.tables import by_table
from tests.support.virtual_time import in_virtual_time, until

ARGUMENTS: dict[type[RequestError], dict[str, Any]] = {
    OverloadedError: {"queue_depth": 1, "capacity": 1, "retry_after": 1},
    TooManyRequestsError: {"queue_depth": 1, "capacity": 1, "retry_after": 1},
    UnknownModelError: {"name": "hen"},
    MethodNotAllowedError: {"allow": "POST"},
}
PROMPTS = b"the wolf\nthe little red riding hood\n"


@pytest.fixture
def registered() -> Iterator[None]:
    """The trial dialect has its line."""
    DIALECTS.append(TRIAL)
    yield
    DIALECTS.remove(TRIAL)


# -- all dialects ------------------------------------------------------------------------------------------------------


@by_table("path", "content")
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


@pytest.mark.parametrize("dialect", [*DIALECTS, TRIAL], ids=lambda dialect: type(dialect).__name__)
def test_every_dialect_has_a_reply_to_every_error(dialect: Dialect) -> None:
    for name, kind in vars(errors).items():
        if not isinstance(kind, type) or not issubclass(kind, RequestError):
            continue
        error = kind("why", **ARGUMENTS.get(kind, {}))
        reply = dialect.encode_error(error, Options())
        assert 400 <= HTTPStatus(reply.status) <= 599, name
        assert b"why" in reply.body
    defect = dialect.encode_error(KeyError("secret"), Options(server_error_http_code=555))
    assert defect.status == 555
    assert b"secret" not in defect.body


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
async def test_a_stream_has_the_chunks_of_all_prompts(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/trial/story/stream", PROMPTS)
        await until(lambda: len(hosts.last.submitted) == 2)
        hosts.last.step()
        assert [part[:1] for part in stream.parts] == [b"0", b"1"]
        hosts.last.send(Delta(1, [5], None, FinishReason.LENGTH))
        assert not stream.complete
        hosts.last.send(Delta(0, [5], None, FinishReason.LENGTH))
        await stream.end()
        assert [part[:1] for part in stream.parts] == [b"0", b"1", b"1", b"0"]
        assert stream.complete


@pytest.mark.usefixtures("registered")
@in_virtual_time
async def test_a_client_that_leaves_ends_all_its_prompts(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/trial/story/stream", PROMPTS)
        await until(lambda: len(hosts.last.submitted) == 2)
        stream.leave()
        await stream.end()
        assert sorted(hosts.last.cancelled) == [submitted.request_id for submitted in hosts.last.submitted]
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


def test_a_dialect_without_pages_and_actions_has_none() -> None:
    with pytest.raises(NotImplementedError, match="Lmi has no page /v1/models"):
        DEFAULT.page(RawRequest(b"", {}, "/v1/models"), [])
    with pytest.raises(NotImplementedError, match="Lmi has no action /tokenize"):
        DEFAULT.act(RawRequest(b"", {}, "/tokenize"), [])


def line(tokenizer: Tokenizer, prompt: str) -> bytes:
    """What the trial dialect makes of a prompt whose first two tokens are generated again."""
    ids = tokenizer.encode(prompt)
    return f"{prompt} ({len(ids)}) ->{tokenizer.decode(ids[:2])}".encode()
