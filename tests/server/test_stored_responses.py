"""Stored responses of `/v1/responses` and sessions, which are kept for a client."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from djl_trtllm.api.base import SMALL, Call, ModelContext, RawRequest
from djl_trtllm.api.dialects.responses import Responses
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.access import Access, ApiKey
from djl_trtllm.server.exchange import SessionRequests, SessionUse
from djl_trtllm.service.clients import Session, Sessions
from djl_trtllm.service.lifecycle import parse_call
from tests.api.models import PlayedModel
from tests.server.application import Application, application, body
from tests.support.asgi import JSON, Connection
from tests.support.in_process import Hosts
from tests.support.virtual_time import until

PATH = "/v1/responses"
ONE, TWO = ({**JSON, "x-api-key": key} for key in ("one", "two"))
ACCESS = Access((ApiKey.of("a", "one"), ApiKey.of("b", "two")))


async def ask(served: Application, hosts: Hosts, headers: dict[str, str] = ONE, **body: Any) -> Any:
    """The response to a request that generates three tokens."""
    before = len(hosts.last.submitted)
    sent = orjson.dumps({"max_output_tokens": 3, "temperature": 0, **body})
    asked = served.client.begin("POST", PATH, sent, headers)
    await until(lambda: asked.done() or len(hosts.last.submitted) > before)
    while not asked.done():
        hosts.last.step()
        await asyncio.sleep(0.01)
    await asked.end()
    return asked.json


async def call(served: Application, method: str, name: str, headers: dict[str, str] = ONE) -> Connection:
    return await served.client.begin(method, f"{PATH}/{name}", b"", headers).end()


async def test_only_the_key_that_made_a_response_finds_it(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, access=ACCESS) as served:
        made = await ask(served, hosts, input="The wolf")
        assert (await call(served, "GET", made["id"])).json == made
        for method in ("GET", "DELETE"):
            refused = await call(served, method, made["id"], TWO)
            assert (refused.status, refused.json["error"]["code"]) == (404, "not_found")
        continued = await ask(served, hosts, TWO, input="?", previous_response_id=made["id"])
        assert made["id"] in continued["error"]["message"]
        assert (await call(served, "DELETE", made["id"])).json["deleted"] is True
        assert (await call(served, "GET", made["id"])).status == 404


async def test_a_conversation_goes_on_from_the_response_before(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, access=ACCESS) as served:
        first = await ask(served, hosts, input="The wolf", instructions="Be kind.")
        second = await ask(served, hosts, input="And then?", previous_response_id=first["id"])
        third = await ask(served, hosts, input="The end?", previous_response_id=second["id"])
        texts = [each["output"][0]["content"][0]["text"] for each in (first, second)]
        turns = ["The wolf", texts[0], "And then?", texts[1], "The end?"]
        chat = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
        whole = tokenizer.encode(tokenizer.render_chat(chat), False)
        assert hosts.last.submitted[-1].prompt_ids == whole  # the instructions are not those of the first request
        assert third["previous_response_id"] == second["id"]
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        await ask(served, hosts, input=[{"role": "user", "content": "The wolf"}, item, chat[2]])
        assert hosts.last.submitted[-1].prompt_ids == tokenizer.encode(tokenizer.render_chat(chat[:3]), False)


async def test_a_response_that_is_not_to_be_stored_is_not(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        made = await ask(served, hosts, JSON, input="The wolf", store=False)
        assert made["store"] is False and (await call(served, "GET", made["id"], JSON)).status == 404
    async with application(tokenizer, stored_responses_memory=0) as served:
        made = await ask(served, hosts, JSON, input="The wolf")
        assert (await call(served, "GET", made["id"], JSON)).status == 404


async def test_a_member_with_one_value_is_repeated_as_that_value(hosts: Hosts, tokenizer: Tokenizer) -> None:
    """A request may say 0 for false."""
    async with application(tokenizer) as served:
        made = await ask(served, hosts, JSON, input="The wolf", background=0)
        assert made["background"] is False


async def test_a_stored_conversation_is_bounded_as_a_body(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, max_request_size=2000) as served:
        made: Any = {"id": None}
        for _ in range(20):
            made = await ask(served, hosts, JSON, input="wolf " * 60, previous_response_id=made["id"])
            if made.get("error"):
                break
        assert "max_request_size" in made["error"]["message"] or "max_input_len" in made["error"]["message"]


async def test_what_is_stored_is_read_beside_the_event_loop() -> None:
    class Watched(Responses):
        def parse(self, request: RawRequest, model: ModelContext) -> Call:
            threads.append(threading.get_ident())
            return super().parse(request, model)

    threads: list[int] = []
    model, body = PlayedModel(), orjson.dumps({"input": "The wolf"})
    model.kept.keep("a", "resp", (b"x" * SMALL,), most_bytes=2 * SMALL, seconds=9)
    for key in "ab":
        assert await parse_call(Watched(), RawRequest(body, {}, PATH, key=key), model)
    assert [thread == threading.get_ident() for thread in threads] == [False, True]


async def test_a_text_is_not_counted_that_is_too_long(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, max_request_size=1 << 22) as served:
        chat = {"messages": [{"role": "user", "content": "x" * (1 << 20)}]}
        refused = await served.client.post("/v1/messages/count_tokens", orjson.dumps(chat))
        assert refused.status == 400 and "characters" in refused.json["error"]["message"]


async def test_a_conversation_has_as_many_tokens_as_its_message_is_charged(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        chat = {"system": "Be kind.", "messages": [{"role": "user", "content": "The wolf"}]}
        counted = await served.client.post("/v1/messages/count_tokens", orjson.dumps(chat))
        asked = served.client.begin("POST", "/v1/messages", orjson.dumps({**chat, "max_tokens": 1}))
        await until(lambda: bool(hosts.last.submitted))
        hosts.last.step()
        assert (await asked.end()).json["usage"]["input_tokens"] == counted.json["input_tokens"] > 5


# -- sessions ---------------------------------------------------------------------------------------------------------


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
