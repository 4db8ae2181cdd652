"""Which handler gets a request, its way through a model, the description of the paths, and dialogues with clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from djl_trtllm.api.base import Reply
from djl_trtllm.api.dialects.embeddings import EMBEDDINGS, TEI
from djl_trtllm.api.dialects.lmi.dialect import Lmi
from djl_trtllm.api.dialects.openai.dialect import OPENAI
from djl_trtllm.api.dialects.rerank import RERANK
from djl_trtllm.api.dialects.triton.dialect import TRITON
from djl_trtllm.api.openapi import describe, document
from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.config import Options, Task
from djl_trtllm.errors import DjlTrtllmError, UnknownModelError
from djl_trtllm.model import Tokenizer
from djl_trtllm.server import routes
from djl_trtllm.server.access import Access, ApiKey
from djl_trtllm.server.context import find_model
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.server.routes import OPERATIONS, Description, PathRouter, type_of
from djl_trtllm.service.clients import Clients
from djl_trtllm.service.lifecycle import Registry, ServedModel, State
from djl_trtllm.telemetry import Telemetry
from djl_trtllm.version import __version__
from tests.api.models import check_golden, dumped
from tests.server.application import application, body
from tests.support.asgi import JSON, lifespan
from tests.support.dialogues import Dialogues
from tests.support.in_process import PROMPT, Hosts
from tests.support.plugin import TRIAL, Trial
from tests.support.processes import PATIENCE
from tests.support.tables import by_rows, by_table
from tests.support.virtual_time import until

# A path is found by itself before those with placeholders, wherever the application lies.


PATHS = ("/v2/{model}", "/v2/{model}:predict", "/v2/models", "/v2/models/ready", "/v2/models/{name}", "/{rest:path}")


class Named:
    """Answers with its name and the parameters of the path."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._name == "default" or scope["endpoint"] is self
        await send({"type": "http.response.start", "status": 200, "headers": []})
        text = f"{self._name} {sorted((scope['path_params'] if self._name != 'default' else {}).items())}"
        await send({"type": "http.response.body", "body": text.encode()})


@contextlib.asynccontextmanager
async def life(app: Router) -> AsyncIterator[None]:
    yield


def answer(application: ASGIApp, path: str, root_path: str = "") -> str:
    return asyncio.run(_answer(application, path, root_path))


async def _answer(application: ASGIApp, path: str, root_path: str) -> str:
    transport = httpx.ASGITransport(application, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return (await client.get(path)).text


@by_rows("root_path", ["", "/app"])
@by_table("path", "expected")
def test_the_path_with_the_most_fixed_characters_answers(path: str, expected: str, root_path: str) -> None:
    router = PathRouter({path: Named(path) for path in PATHS}, Named("default"), life)
    assert answer(router, root_path + path, root_path) == expected


def test_parameters_of_an_outer_application_stay() -> None:
    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        await router({**scope, "path_params": {"tenant": "t"}}, receive, send)

    router = PathRouter({"/models": Named("models")}, Named("default"), life)
    assert answer(outer, "/models") == "models [('tenant', 't')]"


def test_a_path_with_a_placeholders_characters_is_not_looked_up() -> None:
    router = PathRouter({"/v2/{model}": Named("model")}, Named("default"), life)
    assert answer(router, "/v2/%7Bmodel%7D") == "model [('model', '{model}')]"


def test_another_path_is_the_defaults() -> None:
    router = PathRouter({"/v2/models": Named("models")}, Named("default"), life)
    assert answer(router, "/v2/model") == "default []"
    assert answer(router, "/v2/models/") == "default []"


def registry(*names: str) -> Registry:
    made = Registry()
    for name in names:
        made.add(ServedModel(name, f"/{name}"))
    return made


@pytest.mark.parametrize("name", ["story", None, "ensemble"])
def test_the_only_model_has_aliases_and_needs_no_name(name: str | None) -> None:
    assert find_model(registry("story"), TRITON, name).name == "story"


def test_a_model_may_have_the_name_of_an_alias() -> None:
    assert find_model(registry("story", "ensemble"), TRITON, "ensemble").name == "ensemble"


def test_an_endpoint_may_be_the_name_of_a_model() -> None:
    assert find_model(registry("story", "tale"), TRITON, None, "tale").name == "tale"


@by_table("name", "endpoint", "message")
def test_a_model_that_is_not_there(name: str | None, endpoint: str | None, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        find_model(registry("story", "tale"), TRITON, name, endpoint)


def text(tokenizer: Tokenizer, tokens: int) -> str:
    """What the scripted executor makes of the prompt."""
    return tokenizer.decode(tokenizer.encode(PROMPT)[:tokens])


# -- generating --------------------------------------------------------------------------------------------------------


@by_table("path", "query", "headers", apart=True)
async def test_every_path_of_a_model_generates(
    hosts: Hosts, tokenizer: Tokenizer, path: str, query: str, headers: dict[str, str]
) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        if path != "/invocations" or query or headers:
            await served.load(tokenizer, "fable")
        answer = await served.client.post(path, body(4), {**JSON, **headers}, query)
        assert (answer.status, answer.json["generated_text"]) == (200, text(tokenizer, 4))
        assert hosts.made[0].submitted != []


async def test_an_endpoints_openai_body_names_the_model_before_the_endpoint(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        await served.load(tokenizer, "fable")
        for endpoint, model, used in (("story", "fable", 1), ("story", "", 0), ("fable", "tgi", 1)):
            content = orjson.dumps({"model": model, "prompt": "the wolf", "max_tokens": 2})
            before = len(hosts.made[used].submitted)
            answer = await served.client.post(f"/endpoints/{endpoint}/openai/v1/completions", content)
            assert (answer.status, len(hosts.made[used].submitted)) == (200, before + 1)
        content = orjson.dumps({"model": "hen", "prompt": "the wolf"})
        answer = await served.client.post("/endpoints/story/openai/v1/completions", content)
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


async def test_a_stream_has_a_part_for_every_iteration(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/invocations", body(3, stream=True))
        await until(lambda: bool(hosts.last.submitted))
        for parts in (1, 2, 3):
            assert not stream.complete
            hosts.last.step()
            assert len(stream.parts) == parts
        await stream.end()
        assert stream.complete
        assert stream.lines[-1]["generated_text"] == text(tokenizer, 3)


async def test_a_request_goes_to_the_worker_with_the_least_to_do(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, workers=2) as served:
        streams = [served.client.begin("POST", "/invocations", body(1)) for _ in range(2)]
        await until(lambda: all(host.submitted for host in hosts.made))
        for host in hosts.made:
            host.step()
        for stream in streams:
            await stream.end()


async def test_a_client_that_leaves_is_cancelled(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/invocations", body(100, stream=True))
        await until(lambda: bool(hosts.last.submitted))
        hosts.last.step()
        stream.leave()
        await stream.end()
        assert hosts.last.cancelled == [hosts.last.submitted[0].request_id]
        hosts.last.step()
        assert served.registry.models["story"].workers[0].load_now == 0


async def test_a_handler_that_is_cancelled_cancels_its_generation(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/invocations", body(100, stream=True))
        await until(lambda: bool(hosts.last.submitted))
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream.end()
        assert len(hosts.last.cancelled) == 1


# -- refusing ----------------------------------------------------------------------------------------------------------


async def test_a_model_that_ends_tells_clients_to_go_elsewhere(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        served.registry.models["story"].refuse_new()
        answer = await served.client.begin("POST", "/invocations", None).end()
        assert (answer.status, answer.headers["connection"], answer.headers["retry-after"]) == (529, "close", "1")
        assert answer.json["message"] == "model story is shutting down"


# -- what is no request of a model -------------------------------------------------------------------------------------


@by_rows("method", ["GET", "HEAD"])
@by_rows("path", ["/ping", "/metrics", "/prometheus/metrics", "/models"])
async def test_pages_take_get_and_head(method: str, path: str) -> None:
    async with application() as served:
        assert (await served.client.get(path, method=method)).status == 200


async def test_two_actions_run_64_wait_and_the_next_one_is_refused(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    def act(*_: object) -> Reply:
        assert free.wait(PATIENCE)
        return Reply.json({})

    monkeypatch.setattr(type(OPENAI), "act", act)
    content = b'{"model": "story", "prompt": "a wolf"}'
    async with application(tokenizer) as served:
        asked = [served.client.begin("POST", "/tokenize", content) for _ in range(66)]
        await asyncio.sleep(0.1)
        refused = await served.client.post("/tokenize", content)
        free.set()
        assert [(await each.end()).status for each in asked] == [200] * 66
        assert "64 requests" in refused.body.decode()
        assert refused.headers["retry-after"] == "1"
        assert (await served.client.post("/tokenize", content)).status == 200


async def test_the_application_has_a_life() -> None:
    async with application() as served:
        async with lifespan(served.app):
            assert served.lives == ["begun"]
        assert served.lives == ["begun", "ended"]


# -- /ping -------------------------------------------------------------------------------------------------------------


@by_rows(
    ("states", "status", "words"),
    [
        ([], 200, []),
        ([State.READY], 200, ["Healthy"]),
        ([State.LOADING], 503, ["PENDING"]),
        ([State.RECOVERING], 503, ["Unhealthy"]),
        ([State.DRAINING], 503, ["Unhealthy"]),
        ([State.STOPPED], 503, ["Unhealthy"]),
        ([State.FAILED], 500, ["FAILED"]),
        ([State.READY, State.LOADING], 503, ["Healthy", "PENDING"]),
        ([State.LOADING, State.FAILED, State.READY], 500, ["PENDING", "FAILED", "Healthy"]),
    ],
)
async def test_ping_is_200_when_every_model_of_the_start_is_ready(
    states: list[State], status: int, words: list[str]
) -> None:
    async with application() as served:
        for number, state in enumerate(states):
            model = ServedModel(f"m{number}", "/")
            model.workers[0].state = state
            served.registry.add(model)
        answer = await served.client.get("/ping")
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
        assert answer.json == {f"m{number}": {"status": word} for number, word in enumerate(words)}
        posted = await served.client.post("/ping")
        assert (posted.status, posted.json) == (status, answer.json)


async def test_models_that_were_registered_later_do_not_make_a_server_ill() -> None:
    async with application() as served:
        served.registry.add(ServedModel("later", "/", at_startup=False))
        answer = await served.client.get("/ping")
        assert (answer.status, answer.json) == (200, {"later": {"status": "PENDING"}})


# -- defects -----------------------------------------------------------------------------------------------------------


def broken(*_: object) -> None:
    raise KeyError("secret")


async def test_a_defect_before_the_answer_is_500_and_in_the_log(
    hosts: Hosts, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with application(tokenizer) as served:
        with monkeypatch.context() as patched:
            patched.setattr(Lmi, "parse", broken)
            answer = await served.client.post("/invocations", body(), {**JSON, "X-Request-Id": "story-1"})
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert "the request failed" in caplog.text and "secret" in caplog.text


async def test_a_defect_in_an_answer_is_the_servers_to_end(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(self: Exchange, *_: object) -> None:
        await self.begin(200, "text/plain", 9)
        raise DjlTrtllmError("half of it")

    async with application(tokenizer) as served:
        with monkeypatch.context() as patched:
            patched.setattr(Exchange, "reply", half)
            with pytest.raises(DjlTrtllmError, match="half of it"):
                await served.client.get("/ping")


# Whose share of the batch a request over HTTP has, and how many requests a client may have.


KEYS = Access((ApiKey.of("web-app", "secret"), ApiKey.of("batch", "other")))


def clients(**options: Any) -> Clients:
    return Clients(Options(**options))


async def test_a_request_over_its_clients_limit_is_answered_with_429_until_one_ends(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    limited = clients(max_requests_per_client=1, client_header="x-user-id")
    async with application(tokenizer, clients=limited) as served:
        ann, bob = ({**JSON, "x-user-id": name} for name in ("ann", "bob"))
        first = served.client.begin("POST", "/invocations", body(4), ann)
        await until(lambda: bool(hosts.last.submitted))
        for path, kind in (("/invocations", "TooManyRequestsException"), ("/predictions/story", None)):
            refused = await served.client.post(path, body(4), ann)
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert kind is None or refused.json["type"] == kind
        other = served.client.begin("POST", "/invocations", body(4), bob)
        await until(lambda: len(hosts.last.submitted) == 2)
        hosts.last.step(4)
        assert [(await each.end()).status for each in (first, other)] == [200, 200]
        again = served.client.begin("POST", "/invocations", body(4), ann)
        await until(lambda: len(hosts.last.submitted) == 3)
        again.leave()
        await again.end()
        assert not limited._requests


async def test_a_request_that_is_refused_or_invalid_does_not_count_any_more(hosts: Hosts, tokenizer: Tokenizer) -> None:
    limited = clients(max_requests_per_client=1)
    async with application(tokenizer, clients=limited) as served:
        for _ in range(2):
            assert (await served.client.post("/invocations", b"{}", JSON)).status == 424
        assert not limited._requests


@by_table("headers", "expected", apart=True)
async def test_a_key_has_its_share_and_its_priority(
    hosts: Hosts, tokenizer: Tokenizer, headers: dict[str, str], expected: list[object]
) -> None:
    some = clients(client_header="x-user-id", priority_header="x-priority")
    async with application(tokenizer, clients=some, access=KEYS) as served:
        request = served.client.begin("POST", "/invocations", body(4), {**JSON, **headers})
        await until(lambda: bool(hosts.last.submitted))
        batch = served.registry.models["story"].workers[0].batch
        assert batch is not None
        (slot,) = batch._running.values()
        assert [slot.client.key, slot.priority] == expected
        hosts.last.step(4)
        assert (await request.end()).status == 200


@pytest.mark.parametrize("counts", [False, True])
async def test_custom_attributes_name_a_client_only_where_the_operator_says_so(
    hosts: Hosts, tokenizer: Tokenizer, counts: bool
) -> None:
    header = "X-Amzn-SageMaker-Custom-Attributes"
    names = {"client_header": "x-user-id", "priority_header": "x-priority"}
    some = clients(**names, max_requests_per_client=1, client_from_custom_attributes=counts)
    async with application(tokenizer, clients=some) as served:
        ann, bob = ({**JSON, header: f"x-user-id={name};x-priority=low"} for name in ("ann", "bob"))
        first = served.client.begin("POST", "/invocations", body(4), ann)
        await until(lambda: bool(hosts.last.submitted))
        second = served.client.begin("POST", "/invocations", body(4), bob)
        await until(lambda: second.status == 429 or len(hosts.last.submitted) == 2)
        urgent = await served.client.post("/invocations", body(4), {**JSON, header: "x-user-id=c;x-priority=urgent"})
        assert urgent.status == (424 if counts else 429)
        hosts.last.step(4)
        assert ((await first.end()).status, (await second.end()).status) == (200, 200 if counts else 429)


@pytest.mark.parametrize("counts", [False, True])
async def test_an_api_key_counts_only_as_a_header(hosts: Hosts, tokenizer: Tokenizer, counts: bool) -> None:
    hosts.alone = True
    header = "x-amzn-sagemaker-custom-attributes"
    some = clients(client_from_custom_attributes=counts)
    async with application(tokenizer, access=KEYS, clients=some) as served:
        for attributes in ("x-api-key=secret", "authorization=Bearer secret"):
            answer = await served.client.post("/invocations", body(), {**JSON, header: attributes})
            assert answer.status == 401
        given = {**JSON, "x-api-key": "secret", header: "a=b;x-api-key=secret"}
        answer = await served.client.post("/invocations", body(), given)
        assert (answer.status, answer.headers[header]) == (200, "a=b")


async def test_what_is_reported_of_a_request_has_its_client(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.alone = True
    reported: list[str] = []
    monkeypatch.setattr(Telemetry, "ended", lambda _, request: reported.append(request.client))
    async with application(tokenizer, access=KEYS, clients=clients(client_header="x-user-id")) as served:
        for headers in ({"x-api-key": "secret"}, {"x-user-id": "ann@example.com"}):
            await served.client.post("/invocations", body(), {**JSON, **headers})
        await served.client.begin("GET", "/v1/models", headers={"x-api-key": "other"}).end()
        (record,) = served.registry.models["story"].statistics.ended
    assert reported == ["web-app", "header:71d4f55f72fa", "batch"]
    assert record.origin.client_label == "web-app"


TASKS = {EMBEDDINGS: Task.EMBED, RERANK: Task.SCORE, TEI: Task.EMBED}
"""The tasks of dialects whose models do not generate."""
EXAMPLES = [
    (path, operation.example, TASKS.get(dialect, Task.GENERATE))
    for dialect in DIALECTS
    for path in (*dialect.paths, *dialect.actions)
    if (operation := describe(dialect, path)).example is not None
]


class Page(HTMLParser):
    """The texts of a page, its addresses, and whether every element ends."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.names: set[str] = set()
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


async def test_the_description_has_every_path_of_the_server() -> None:
    async with application() as served:
        answer = await served.client.get("/openapi.json")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert isinstance(served.app, Router)
        mounted = {getattr(route, "path", "") for route in served.app.routes}
        assert answer.json["paths"].keys() == mounted
        assert (await served.client.get("/openapi.json")).body == answer.body


async def test_every_own_operation_is_answered(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        for name, described in sorted(OPERATIONS.items()):
            method, path = name.split()
            answer = await served.client.get(path.replace("{model}", "story"), method=method)
            assert answer.status == 200 or answer.status in described.errors, (name, answer.body)


@pytest.mark.parametrize(("path", "example", "task"), EXAMPLES, ids=[path for path, *_ in EXAMPLES])
async def test_every_example_is_answered(
    hosts: Hosts, tokenizer: Tokenizer, path: str, example: Any, task: Task
) -> None:
    hosts.alone = True
    async with application(tokenizer, task=task) as served:
        path = path.replace("{model}", "story").replace("{version}", "1")
        answer = await served.client.post(path, orjson.dumps(example))
        assert answer.status == 200, answer.body


async def test_the_version_and_the_links_of_the_root() -> None:
    async with application() as served:
        assert (await served.client.get("/version")).json == {"version": __version__}
        about = (await served.client.get("/")).json
        for link in about["links"].values():
            assert (await served.client.get(link)).status == 200
        assert list(about["apis"]) == [dialect.name for dialect in DIALECTS]


async def test_the_page_shows_every_operation_and_loads_nothing() -> None:
    async with application() as served:
        answer = await served.client.get("/docs")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        page = Page(answer.body.decode())
        described = (await served.client.get("/openapi.json")).json
        assert described["paths"].keys() <= set(page.texts)
        assert {"GET", "POST", "PUT", "DELETE"} <= set(page.texts)
        assert page.addresses == ["openapi.json"]
        assert not page.names & {"script", "link", "img", "iframe"}
        assert {"max_new_tokens", "repetition_penalty", "max_completion_tokens"} <= set(page.texts)
        assert (await served.client.get("/docs")).body == answer.body


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_the_description_is_made_beside_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def made(*given: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return document(*given)

    monkeypatch.setattr(routes, "document", made)
    async with application() as served:
        assert (await served.client.get(path)).status == 200
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_a_dialect_needs_no_change_here_to_be_shown() -> None:
    reply = Description([TRIAL], Options()).page
    assert "/trial/{model}/stream" in Page(reply.body.decode()).texts


@by_table("schema", "words")
def test_a_type_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_of(schema) == words


def test_the_servers_own_paths_are_as_stored() -> None:
    lines = [f"{name} {dumped(operation._asdict())}\n" for name, operation in OPERATIONS.items()]
    check_golden("description-Server", "".join(lines).encode())


# -- dialogues ---------------------------------------------------------------------------------------------------------


DIALOGUES = Dialogues(__file__)


@pytest.mark.parametrize("rule", DIALOGUES.rules)
async def test_the_server_answers_as_in_the_dialogue(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path, rule: str
) -> None:
    await DIALOGUES.check(rule, hosts, tokenizer, tmp_path)


async def test_an_unknown_path_is_refused_beside_a_dialect_without_paths(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a dialect of a package is served by gRPC only."""

    class WithoutPaths(Trial):
        paths = pages = actions = ()  # type: ignore[assignment]  # fewer than the trial has

    monkeypatch.setattr(routes, "DIALECTS", (WithoutPaths(), *DIALECTS))
    rule = "an unknown path is refused as the API does whose paths are like it"
    await DIALOGUES.check(rule, hosts, tokenizer, tmp_path)
