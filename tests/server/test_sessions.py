"""SageMaker's stateful sessions over HTTP, as its model-hosting-container-standards have them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api import RawRequest
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.access import Access, ApiKey
from djl_trtllm.server.routes import SessionRequests, SessionUse
from djl_trtllm.service.clients import Session, Sessions
from tests.server.application import Application, application, body
from tests.support.in_process import Hosts

ID, NEW, CLOSED = (f"x-amzn-sagemaker-{name}" for name in ("session-id", "new-session-id", "closed-session-id"))
OPEN, CLOSE = b'{"requestType": "NEW_SESSION"}', b'{"requestType": "CLOSE"}'


@pytest.fixture
def hosts(hosts: Hosts) -> Hosts:
    """Engine processes that generate by themselves."""
    hosts.alone = True
    return hosts


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path, 60, 5)


async def opened(served: Application, content: bytes = OPEN, **headers: str) -> str:
    answer = await served.client.post("/invocations", content, headers)
    assert answer.status == 200
    identifier, _, expires = answer.headers[NEW].partition("; Expires=")
    assert len(identifier) == 36 and expires.endswith("Z")
    return str(identifier)


async def test_a_session_is_opened_used_and_closed(hosts: Hosts, tokenizer: Tokenizer, sessions: Sessions) -> None:
    async with application(tokenizer, sessions=sessions) as served:
        identifier = await opened(served)
        for _ in range(2):
            answer = await served.client.post("/invocations", body(), {ID: identifier})
            assert (answer.status, NEW in answer.headers) == (200, False)
        answer = await served.client.post("/invocations", CLOSE, {ID: identifier})
        assert (answer.status, answer.headers[CLOSED]) == (200, identifier)
        assert answer.json == {"result": f"Session {identifier} closed"}
        answer = await served.client.post("/invocations", body(), {ID: identifier})
        assert (answer.status, answer.json["code"]) == (400, 400)
        assert (await served.client.post("/invocations", body())).status == 200


async def test_a_header_opens_a_session_for_its_request(hosts: Hosts, tokenizer: Tokenizer, sessions: Sessions) -> None:
    async with application(tokenizer, sessions=sessions) as served:
        identifier = await opened(served, body(), **{ID: "NEW_SESSION"})
        assert sessions.find(identifier).worker is served.registry.models["story"].workers[0]
        assert len(hosts.last.submitted) == 1
        await opened(served, b" ", **{ID: "NEW_SESSION"})
        assert len(hosts.last.submitted) == 1
        answer = await served.client.post("/invocations", OPEN)
        assert (answer.status, answer.json["queue_capacity"]) == (503, 5)


async def test_a_client_leaves_sessions_for_others_and_none_has_its_id_in_the_log(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sessions, keys = Sessions(tmp_path, 60, 4), Access((ApiKey.of("a", "of-a"), ApiKey.of("b", "of-b")))
    async with application(tokenizer, sessions=sessions, access=keys) as served:

        async def status(key: str) -> int:
            return (await served.client.post("/invocations", OPEN, {"x-api-key": key})).status

        assert [await status("of-a") for _ in range(3)] == [200, 200, 503]
        assert await status("of-b") == 200
        (identifier, *_) = os.listdir(tmp_path)
        answer = await served.client.post("/invocations", CLOSE, {ID: identifier, "x-api-key": "of-b"})
        assert answer.status == 200
    assert "session" in caplog.text
    assert identifier not in caplog.text


async def test_a_refused_request_leaves_no_session(
    hosts: Hosts, tokenizer: Tokenizer, sessions: Sessions, tmp_path: Path
) -> None:
    async with application(tokenizer, sessions=sessions) as served:
        answer = await served.client.post("/invocations", body(0), {ID: "NEW_SESSION"})
        assert (answer.status, NEW in answer.headers) == (424, False)
        assert os.listdir(tmp_path) == []
        identifier = await opened(served)
        assert (await served.client.post("/invocations", body(0), {ID: identifier})).status == 424
        assert sessions.find(identifier)


async def test_bodies_that_only_mention_sessions_are_ordinary(
    hosts: Hosts, tokenizer: Tokenizer, sessions: Sessions
) -> None:
    async with application(tokenizer, sessions=sessions, max_request_size=100_000) as served:
        answer = await served.client.post("/invocations", b'{"inputs": "say \\"requestType\\""}')
        assert answer.status == 200
        large = b'{"requestType": "CLOSE", "inputs": "' + b" " * 40_000 + b'"}'
        for broken in (b'{"requestType"', b'["requestType"]', large):
            assert (await served.client.post("/invocations", broken)).status == 424


async def test_a_session_stays_with_its_worker(hosts: Hosts, tokenizer: Tokenizer, sessions: Sessions) -> None:
    async with application(tokenizer, sessions=sessions, workers=2) as served:
        identifier, model = await opened(served), served.registry.models["story"]
        session: Session = sessions.find(identifier)
        session.worker = model.workers[1]
        for _ in range(3):
            await served.client.post("/invocations", body(), {ID: identifier})
        assert [len(host.submitted) for host in hosts.made] == [0, 3]
        model.workers[1].refuse_new()
        assert (await served.client.post("/invocations", body(), {ID: identifier})).status == 200
        assert session.worker is model.workers[0]


async def test_a_models_own_code_gets_the_folder_and_its_own_bodies(sessions: Sessions) -> None:
    session = sessions.create()
    use = await SessionRequests(sessions).use(RawRequest(b"", {ID: session.id}))
    assert use.request.properties["session_path"] == str(session.path)
    own: Any = RawRequest(OPEN, {})
    assert await SessionRequests(None).use(own, custom=True) == SessionUse(own)
