"""Which replica of a fleet gets a request, over replicas that are sockets of this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from djl_trtllm.routing import fleet as module
from djl_trtllm.routing.fleet import Fleet, Load, Question

NAMES = "abcd"
IDLE = dict.fromkeys(NAMES, Load())


def routed(fleet: Fleet, *bodies: bytes, session: str = "", loads: dict[str, Load] = IDLE) -> list[str]:
    questions = [Question.of(body, session) for body in bodies]
    for question in questions:
        fleet.route(question, loads)
    return [question.replica for question in questions]


def prompt(text: str, times: int = 100) -> bytes:
    return b'{"prompt": "' + text.encode() * times + b'"}'


def test_the_next_turn_goes_to_the_replica_of_the_one_before() -> None:
    fleet = Fleet(slack=5)
    turns = [prompt(text) for text in ("one ", "two ", "three ", "four ", "five ")]
    first = routed(fleet, *turns)
    assert routed(fleet, *[turn.replace(b'"}', b'and so on"}') for turn in turns]) == first
    assert len(set(first)) > 1


def test_several_routers_agree_also_where_one_had_to_pass_over_a_replica() -> None:
    routers: list[Fleet] = []
    told: list[str] = []

    def tell(key: bytes, replica: str) -> None:
        told.append(replica)
        for router in routers:
            router.learn(key, replica)

    routers += [Fleet(slack=1, on_detour=tell) for _ in range(2)]
    turns = [prompt(f"conversation {number} ") for number in range(24)]
    first = routed(routers[0], *turns)
    assert 0 < len(told) < len(turns), "where they would agree anyway, nothing is said"
    longer = [turn.replace(b'"}', b'and so on"}') for turn in turns]
    loads = {name: Load(0, 24) for name in NAMES}
    same = [routed(routers[1], turn, loads=loads)[0] for turn in longer]
    assert sum(one == other for one, other in zip(first, same, strict=True)) >= 22


def test_a_session_stays_whatever_it_says() -> None:
    assert len(set(routed(Fleet(slack=2), prompt("a"), prompt("b"), b"", session="ada"))) == 1


def test_a_beginning_that_all_prompts_share_does_not_fill_one_replica() -> None:
    fleet = Fleet(slack=2)
    counts = [routed(fleet, *[prompt("the same ")] * 16).count(name) for name in NAMES]
    assert sum(counts) == 16 and max(counts) - min(counts) <= 3


def test_a_report_takes_the_place_of_what_was_sent_before_it() -> None:
    fleet = Fleet(slack=0)
    loads = {"a": Load(3, 10), "b": Load(4, 10)}
    assert routed(fleet, b"", b"", b"", loads=loads) == ["a", "a", "b"]
    assert routed(fleet, b"", loads={"a": Load(3, 12), "b": Load(1, 10)}) == ["b"]


def test_short_requests_that_come_at_the_usual_rate_do_not_add_up_between_reports() -> None:
    fleet = Fleet(slack=2)
    loads = {"a": Load(2, 10), "b": Load(2, 10)}
    routed(fleet, b"", loads=loads)
    loads = {"a": Load(2, 50), "b": Load(2, 50)}
    turns = [prompt(f"conversation {number} ") for number in range(99)]
    at_a = next(turn for turn in turns if routed(Fleet(slack=2), turn, loads=loads) == ["a"])
    assert set(routed(fleet, *[at_a] * 42, loads=loads)) == {"a"}
    assert "b" in routed(fleet, *[at_a] * 3, loads=loads)


@contextlib.asynccontextmanager
async def listening(answers: Callable[[], bool], stays: bool = True) -> AsyncIterator[tuple[asyncio.Server, int]]:
    """A replica that answers, or not, until it is closed; each connection ends at once where it does not stay."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if answers():
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read(-1 if stays else 0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server, server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def becomes(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():  # noqa: ASYNC110  # nothing says when it does
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), 30)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.05)


@pytest.mark.parametrize("stays", [True, False])
def test_a_replica_that_does_not_answer_gets_nothing_until_it_does(stays: bool) -> None:
    async def story() -> None:
        fleet, silent, asked = Fleet(slack=2), False, Counter[str]()
        async with (
            listening(lambda: asked.update("a") is None and not silent, stays) as (_, one),
            listening(lambda: True) as (_, two),
        ):
            fleet.update({"a": ("127.0.0.1", one), "b": ("127.0.0.1", two)}, "ab")
            loads = {"a": Load(0), "b": Load(10**6)}

            def goes_to(name: str) -> bool:
                return routed(fleet, b"", loads=loads) == [name]

            # Only what has answered can be silent: the second question follows the first answer.
            await becomes(lambda: asked["a"] >= 2)
            assert goes_to("a")
            silent = True
            await becomes(lambda: goes_to("b"))
            silent = False
            await becomes(lambda: goes_to("a"))
            fleet.update({}, ())

    asyncio.run(story())


@pytest.mark.parametrize("answers", [True, False])
def test_a_replica_that_ends_each_connection_at_once_is_asked_twice_and_then_after_pauses(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 600.0)

    async def story() -> None:
        fleet, asked = Fleet(slack=2), Counter[str]()
        async with listening(lambda: asked.update("a") is None and answers, stays=False) as (_, port):
            fleet.update({"a": ("127.0.0.1", port)}, "a")
            await becomes(lambda: asked["a"] >= 2)
            await asyncio.sleep(0.1)
            assert asked["a"] == 2
            fleet.update({}, ())

    asyncio.run(story())


class Name(str):
    """A name to which there are weak references."""


def test_nothing_is_kept_of_a_replica_that_is_gone_whether_it_had_an_address_or_was_ever_there() -> None:
    async def story() -> None:
        fleet = Fleet(slack=2)
        name, moved = Name("a"), Name("gone")
        fleet.update({}, [name])
        fleet.route(Question((), "", "one"), {name: Load(1, 1)})
        fleet.route(Question((), "", "two", moved), {name: Load(1, 1)})
        left = [weakref.ref(name), weakref.ref(moved)]
        del name, moved
        fleet.update({}, NAMES[1:])
        gc.collect()
        assert [ref() for ref in left] == [None, None]

    asyncio.run(story())


def test_what_was_sent_to_a_replica_without_an_address_counts_while_it_is_there() -> None:
    async def story() -> None:
        fleet = Fleet(slack=2)
        loads = {"a": Load(0, 1), "b": Load(2, 1)}
        assert routed(fleet, b"", b"", loads=loads) == ["a", "a"]
        fleet.update({}, "ab")
        assert routed(fleet, b"", b"", loads=loads) == ["a", "b"]

    asyncio.run(story())


def test_a_request_that_ended_two_replicas_is_refused_wherever_it_was_sent() -> None:
    async def story() -> None:
        fleet, bad = Fleet(slack=2), prompt("bad")
        async with contextlib.AsyncExitStack() as stack:
            asked: Counter[str] = Counter()

            def answers(name: str) -> Callable[[], bool]:
                return lambda: asked.update([name]) is None

            servers = {name: await stack.enter_async_context(listening(answers(name))) for name in NAMES}
            fleet.update({name: ("127.0.0.1", port) for name, (_, port) in servers.items()}, NAMES)

            def refused() -> float:
                question = Question.of(bad)
                fleet.route(question, IDLE)
                return question.refused_for

            # Only what has answered can be lost: the second question follows the first answer.
            await becomes(lambda: min(asked[name] for name in NAMES) >= 2)
            (chosen,) = routed(fleet, bad)
            other = next(name for name in NAMES if name != chosen)
            # HAProxy does so too: it takes another replica than the router had chosen.
            fleet.route(Question((), "", Question.of(bad).digest, other), IDLE)
            for name in (chosen, other):
                server, _ = servers[name]
                server.close()
            await becomes(lambda: refused() > 0)
            good = Question.of(prompt("good"))
            fleet.route(good, IDLE)
            assert not good.refused_for and good.replica not in (chosen, other)
            fleet.update({}, ())

    asyncio.run(story())


def test_bodies_that_differ_beyond_what_the_router_sees_are_different_requests() -> None:
    assert Question.of(b"the same", truncated="8/10").digest != Question.of(b"the same", truncated="8/11").digest
