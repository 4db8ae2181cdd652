from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from djl_trtllm.api import Reply
from djl_trtllm.cluster import replica_metrics
from djl_trtllm.cluster.forwarding import ForwardedRequest, Head
from djl_trtllm.cluster.replica_metrics import ReplicaMetrics, joined
from djl_trtllm.errors import NotReadyError, OverloadedError

REQUEST = ForwardedRequest({"path": "/metrics", "headers": [(b"Accept", b"openmetrics"), (b"x-key", b"k")]}, b"")
TYPE = [(b"content-type", b"text/plain; version=0.0.4")]
ONE = b"""# HELP up_total Ups # HELP downs.
# TYPE up_total counter
up_total{model="a # HELP"} 1.0
up_total{model="b"} 2.0
# HELP stall_seconds Late.
# TYPE stall_seconds histogram
stall_seconds_bucket{le="+Inf"} 3.0
stall_seconds_count 3.0
"""
TWO = b"""# HELP up_total Ups, as another version says it.
# TYPE up_total counter
up_total{model="a"} 4.0
# HELP memory_bytes Memory.
# TYPE memory_bytes gauge
memory_bytes 5e+06
"""


OF_REQUEST = ContextVar("OF_REQUEST", default="none")
"""What Ray keeps of the request in whose context a call is made: Ray gives those with the same one a single replica."""


class Replicas:
    """A deployment with replicas of these names. Calls get `answers`, or what a replica of that name has."""

    def __init__(self, *names: str, known: bool = True) -> None:
        self.names = names
        self.known = known
        self.asked: list[str] = []
        self.contexts: list[str] = []
        self.requests: list[ForwardedRequest] = []
        self.cancelled = 0
        self.now = self.most = 0
        self.answers: dict[str, Callable[[], Any]] = {}

    def remote(self, request: ForwardedRequest) -> Call:
        name = request.replica or self.names[0]
        self.known = True
        self.contexts.append(OF_REQUEST.get())
        OF_REQUEST.set(name)
        self.asked.append(name)
        self.requests.append(request)
        return Call(self, name)


class Call:
    def __init__(self, of: Replicas, name: str) -> None:
        self._of, self._name = of, name
        self._parts: AsyncIterator[Any] | None = None

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        self._parts = self._parts or self._answer()
        return await anext(self._parts)

    async def _answer(self) -> AsyncIterator[Any]:
        self._of.now += 1
        self._of.most = max(self._of.most, self._of.now)
        try:
            await asyncio.sleep(0)
            if self._name in self._of.answers:
                yield await self._of.answers[self._name]()
            else:
                yield Head(200, [*TYPE, (b"x-replica", self._name.encode())], b"", False)
                yield f'# HELP up Is up.\n# TYPE up gauge\nup{{own="{self._name}"}} 1.0\n'.encode()
        finally:
            self._of.now -= 1

    def cancel(self) -> None:
        self._of.cancelled += 1


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reply]:
    """The page of the replicas of deployments."""

    def asked(**models: Replicas) -> Reply:
        monkeypatch.setattr(
            replica_metrics, "replicas_of", lambda name: list(models[name].names) if models[name].known else []
        )

        async def reply() -> Reply:
            OF_REQUEST.set("the client's")
            return await ReplicaMetrics(models).reply(REQUEST)

        return asyncio.run(reply())

    return asked


def scraped(reply: Reply) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(reply.body.decode())
    (found,) = [family for family in families if family.name == "djl_trtllm_replica_scraped"]
    return {(each.labels["deployment"], each.labels["replica"]): each.value for each in found.samples}


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def test_texts_become_one_with_a_head_for_each_family_and_labels_of_each_text() -> None:
    text = joined({("m", "r1"): ONE, ("m", "r2"): TWO}).decode()
    assert text == (
        "# HELP up_total Ups # HELP downs.\n"
        "# TYPE up_total counter\n"
        'up_total{deployment="m",replica="r1",model="a # HELP"} 1.0\n'
        'up_total{deployment="m",replica="r1",model="b"} 2.0\n'
        'up_total{deployment="m",replica="r2",model="a"} 4.0\n'
        "# HELP stall_seconds Late.\n"
        "# TYPE stall_seconds histogram\n"
        'stall_seconds_bucket{deployment="m",replica="r1",le="+Inf"} 3.0\n'
        'stall_seconds_count{deployment="m",replica="r1"} 3.0\n'
        "# HELP memory_bytes Memory.\n"
        "# TYPE memory_bytes gauge\n"
        'memory_bytes{deployment="m",replica="r2"} 5e+06\n'
    )


def test_a_name_with_quotes_and_lines_is_a_label() -> None:
    name = 'a "name" \\1\n'
    families = list(text_string_to_metric_families(joined({(name, "r"): TWO}).decode()))
    assert {sample.labels["deployment"] for family in families for sample in family.samples} == {name}


def test_a_page_has_all_replicas_of_all_models(page: Callable[..., Reply]) -> None:
    a, b = Replicas("r1", "r2"), Replicas("r3")
    reply = page(a=a, b=b)
    assert (reply.status, reply.content_type) == (200, "text/plain; version=0.0.4")
    assert reply.body.count(b"# TYPE up gauge\n") == 1
    for of in ((b"a", b"r1"), (b"a", b"r2"), (b"b", b"r3")):
        assert b'up{deployment="%b",replica="%b",own="%b"} 1.0\n' % (*of, of[1]) in reply.body
    assert scraped(reply) == {("a", "r1"): 1, ("a", "r2"): 1, ("b", "r3"): 1}
    assert a.cancelled == 2
    assert {*a.contexts, *b.contexts} == {"none"}
    # The clients' keys go to the replicas. OpenMetrics has a last line, and cannot be put together.
    assert {tuple(request.scope["headers"]) for request in a.requests} == {((b"x-key", b"k"),)}


def test_before_its_first_request_a_gateway_asks_any_replica_and_then_the_others(page: Callable[..., Reply]) -> None:
    model = Replicas("r1", "r2", "r3", known=False)
    assert scraped(page(m=model)) == {("m", "r1"): 1, ("m", "r2"): 1, ("m", "r3"): 1}
    assert model.asked == ["r1", "r2", "r3"]


def test_a_replica_that_fails_or_does_not_answer_is_named_and_the_others_are_there(
    page: Callable[..., Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies() -> None:
        raise RuntimeError("died")

    async def refuses() -> Head:
        return Head(500, [], b"# no samples", True)

    monkeypatch.setattr(replica_metrics, "_REPLICA_SECONDS", 0.05)
    model = Replicas("r4", "r1", "r2", "r3")
    model.answers = {"r2": dies, "r3": never, "r4": refuses}
    reply = page(m=model)
    assert (reply.status, reply.content_type) == (200, "text/plain; version=0.0.4")
    assert b"no samples" not in reply.body
    assert scraped(reply) == {("m", "r1"): 1, ("m", "r2"): 0, ("m", "r3"): 0, ("m", "r4"): 0}
    assert model.cancelled == 4


def test_a_page_ends_in_time_with_what_there_is(page: Callable[..., Reply], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_metrics, "_PAGE_SECONDS", 0.05)
    model = Replicas("r1", "r2")
    model.answers = {"r2": never}
    assert scraped(page(m=model)) == {("m", "r1"): 1, ("m", "r2"): 0}


def test_some_replicas_are_asked_at_a_time(page: Callable[..., Reply]) -> None:
    model = Replicas(*(f"r{number}" for number in range(40)))
    assert sum(scraped(page(m=model)).values()) == 40
    assert model.most == 16


def test_a_page_has_a_greatest_size(page: Callable[..., Reply], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Replicas("r1", "r2")
    size = len('# HELP up Is up.\n# TYPE up gauge\nup{own="r1"} 1.0\n')
    monkeypatch.setattr(replica_metrics, "_MOST_BYTES", 2 * size)
    assert sum(scraped(page(m=model)).values()) == 2
    monkeypatch.setattr(replica_metrics, "_MOST_BYTES", 2 * size - 1)
    assert sum(scraped(page(m=model)).values()) == 1


def test_where_all_replicas_refuse_the_client_gets_what_they_say(page: Callable[..., Reply]) -> None:
    def refuses(status: int) -> Callable[[], Any]:
        async def answer() -> Head:
            return Head(status, [(b"Content-Type", b"application/json")], b"%d" % status, True)

        return answer

    model = Replicas("r1", "r2", "r3")
    model.answers = {"r1": refuses(401), "r2": refuses(500), "r3": refuses(403)}
    assert page(m=model) == Reply(500, "application/json", b"500")


def test_no_answer_is_an_error_that_says_to_come_again(page: Callable[..., Reply]) -> None:
    async def dies() -> None:
        raise RuntimeError("died")

    model = Replicas("r1")
    model.answers = {"r1": dies}
    with pytest.raises(NotReadyError, match="no replica has answered") as raised:
        page(m=model)
    assert raised.value.retry_after == 1


def test_four_pages_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_metrics, "replicas_of", lambda name: ["r1"])
    model = Replicas("r1")

    async def scenario() -> None:
        metrics = ReplicaMetrics({"m": model})
        for _ in range(2):
            pages = [asyncio.create_task(metrics.reply(REQUEST)) for _ in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="4 pages of metrics are being made, and no more than 4 may"):
                await metrics.reply(REQUEST)
            assert {reply.status for reply in await asyncio.gather(*pages)} == {200}

    asyncio.run(scenario())
