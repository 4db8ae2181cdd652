"""Which replica of a fleet gets a request, over replicas that are sockets of this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from djl_trtllm.routing.affinity import PromptKeys, ranked
from djl_trtllm.routing.fleet import Fleet, Load, Question, Sent
from tests.support.virtual_time import in_real_time

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


def test_several_routers_agree_about_conversations_and_loads() -> None:
    routers: list[Fleet] = []

    def tell(sent: Sent, teller: int) -> None:
        routers[1 - teller].note(sent)

    routers += [Fleet(slack=4, on_sent=functools.partial(tell, teller=number)) for number in range(2)]
    said = [f"conversation {number}: " + "once upon a time " * 20 for number in range(24)]
    first = routed(routers[0], *[prompt(text, 1) for text in said])
    for turn in range(1, 7):
        longer = [prompt(text + turn * "and so on " * 40, 1) for text in said]
        assert [*routed(routers[turn % 2], *longer[:12]), *routed(routers[1 - turn % 2], *longer[12:])] == first
    both = [*routed(routers[0], *[b""] * 8), *routed(routers[1], *[b""] * 8)]
    assert set(Counter([*first, *both]).values()) == {10}, "both know what both have sent"


def test_a_session_stays_whatever_it_says() -> None:
    (replica,) = {*routed(Fleet(slack=2), prompt("a"), prompt("b"), b"", session="ada")}
    assert routed(Fleet(slack=2), b"", session="ada", loads={replica: Load()}) == [replica], "when others are gone"


def test_a_beginning_that_all_prompts_share_does_not_fill_one_replica() -> None:
    fleet = Fleet(slack=2)
    counts = [routed(fleet, *[prompt("the same ")] * 16).count(name) for name in NAMES]
    assert sum(counts) == 16 and max(counts) - min(counts) <= 3


@pytest.mark.parametrize(("places", "more"), [(0, 1), (3, 1), (8, 2), (64, 16)])
def test_affinity_gives_way_where_a_replica_has_a_quarter_of_a_batch_more(places: int, more: int) -> None:
    fleet, turn = Fleet(), prompt("the same ")
    loads = {"a": Load(0, 1, places), "b": Load(0, 1, 0)}
    (first,) = routed(fleet, turn, loads=loads)

    def with_more(count: int) -> list[str]:
        # Each report is a new one, so that only its own figures count.
        reports = {name: load._replace(received=10 + count) for name, load in loads.items()}
        return routed(fleet, turn, loads={**reports, first: reports[first]._replace(requests=count)})

    assert with_more(more) == [first]
    assert with_more(more + 1) != [first]


def test_a_report_takes_the_place_of_what_was_sent_before_it() -> None:
    fleet = Fleet(slack=0)
    loads = {"a": Load(3, 10), "b": Load(4, 10)}
    assert routed(fleet, b"", b"", b"", loads=loads) == ["a", "a", "b"]
    assert routed(fleet, b"", loads={"a": Load(3, 12), "b": Load(1, 10)}) == ["b"]


def test_short_requests_that_come_at_the_usual_rate_do_not_add_up_between_reports() -> None:
    fleet = Fleet(slack=2)
    loads = {"a": Load(2, 10), "b": Load(2, 10)}
    assert routed(fleet, *[b""] * 80, loads=loads).count("a") == 40
    loads = {"a": Load(2, 50), "b": Load(2, 50)}
    turns = [prompt(f"conversation {number} ") for number in range(99)]
    at_a = next(turn for turn in turns if routed(Fleet(slack=2), turn, loads=loads) == ["a"])
    assert set(routed(fleet, *[at_a] * 42, loads=loads)) == {"a"}
    assert "b" in routed(fleet, *[at_a] * 3, loads=loads)


@pytest.mark.parametrize("added", ["and so on " * 14, "and so on " * 300])
def test_turns_that_come_faster_than_reports_stay_at_their_replicas(added: str) -> None:
    fleet = Fleet(slack=8)
    said = [f"conversation {number}: " + "once upon a time " * 20 for number in range(24)]
    first = routed(fleet, *[prompt(text, 1) for text in said])
    for turn in range(1, 7):
        # Those of one replica may all come before those of the others.
        for name in NAMES:
            mine = [prompt(text + turn * added, 1) for text, at in zip(said, first, strict=True) if at == name]
            assert set(routed(fleet, *mine)) <= {name}


def test_a_turn_stays_also_where_the_one_before_is_all_that_its_replica_has_more_than_others() -> None:
    fleet, text = Fleet(slack=0), "once upon a time " * 20
    assert len(set(routed(fleet, *[prompt(text * (turn + 1), 1) for turn in range(6)]))) == 1


def test_a_turn_goes_where_the_one_before_was_and_not_where_another_one_began_like_it() -> None:
    fleet, shared = Fleet(slack=9), "once upon a time " * 31
    mine, other = shared + "a" * 200, shared + "b" * 200
    fleet.route(Question.of(prompt(mine, 1)), {"a": Load()})
    fleet.route(Question.of(prompt(other, 1)), {"b": Load()})
    assert routed(fleet, prompt(mine + "more " * 20, 1), loads={"a": Load(5), "b": Load()}) == ["a"]


def test_another_router_knows_which_replica_had_a_beginning() -> None:
    other, shared = Fleet(slack=9), "once upon a time " * 30
    one = Fleet(slack=9, on_sent=other.note)
    question = Question.of(prompt(shared + "a" * 200, 1))
    preferred = ranked(question.prompt.beginnings[0], NAMES)
    one.route(question, {preferred[-1]: Load()})
    assert routed(other, prompt(shared + "b" * 200, 1)) != [preferred[-1]], "the longest is the only one that is said"
    assert routed(other, prompt(shared + "a" * 200, 1)) == [preferred[-1]]


@pytest.mark.parametrize(("load", "goes"), [(1, "a"), (2, "b")])
def test_the_request_of_the_turn_before_is_no_load_of_its_replica_and_others_are(load: int, goes: str) -> None:
    fleet, text = Fleet(slack=0), "once upon a time " * 20
    fleet.route(Question.of(prompt(text, 1)), {"a": Load()})
    assert routed(fleet, prompt(text * 2, 1), loads={"a": Load(load, 1), "b": Load()}) == [goes]


def test_a_turn_that_goes_elsewhere_is_no_more_where_the_one_before_was() -> None:
    fleet, text = Fleet(slack=1), "once upon a time " * 20
    (first,) = routed(fleet, prompt(text, 1))
    busy = {name: Load(5 if name == first else 0) for name in "ab"}
    (second,) = routed(fleet, prompt(text + text, 1), loads=busy)
    assert second != first
    assert routed(fleet, b"", loads={first: Load(0), second: Load(0)}) == [first]


def test_prompts_that_go_on_from_the_same_one_are_counted_each() -> None:
    fleet, text = Fleet(slack=2), "once upon a time " * 20
    routed(fleet, prompt(text, 1))
    counts = [routed(fleet, *[prompt(text + f"{n} " * 200, 1) for n in range(16)]).count(name) for name in NAMES]
    assert sum(counts) == 16 and max(counts) - min(counts) <= 4


def test_the_conversations_that_went_on_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djl_trtllm.routing.fleet._MOST_TURNS", 2)
    sent: list[Sent] = []
    fleet, said = Fleet(slack=9, on_sent=sent.append), [f"{name}: " + "once upon a time " * 20 for name in "xyz"]
    for text in said:
        routed(fleet, prompt(text, 1))
    for text in (said[0], said[2]):
        routed(fleet, prompt(text + "and so on " * 20, 1))
    assert [bool(each.before) for each in sent] == [False, False, False, False, True]


def test_deaths_that_other_routers_have_seen_count() -> None:
    sent: list[Sent] = []
    fleet, questions = Fleet(slack=2, on_sent=sent.append), [Question.of(b"bad"), Question.of(b"worse")]
    for replica in "ab":
        fleet.accuse([question.digest for question in questions], replica)
    for question in questions:
        fleet.route(question, IDLE)
        assert question.refused_for > 0
    assert sent == [], "it goes to no replica"


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


def quick(slack: int = 2, pause_seconds: float = 0.05) -> Fleet:
    """A fleet that finds a silent replica soon."""
    return Fleet(slack, silent_seconds=0.2, pause_seconds=pause_seconds)


@pytest.mark.parametrize("stays", [True, False])
@in_real_time
async def test_a_replica_that_does_not_answer_gets_nothing_until_it_does(stays: bool) -> None:
    fleet, silent, asked = quick(), False, Counter[str]()
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


@in_real_time
async def test_where_no_replica_answers_a_request_goes_to_those_that_answered_last() -> None:
    """A busy machine answers late, a stopped replica never."""

    fleet, silent, asked = quick(), "", Counter[str]()
    async with (
        listening(lambda: asked.update("a") is None and "a" not in silent) as (_, one),
        listening(lambda: asked.update("b") is None and "b" not in silent) as (_, two),
    ):
        fleet.update({"a": ("127.0.0.1", one), "b": ("127.0.0.1", two)}, "ab")
        loads = {"a": Load(0), "b": Load(10**6)}
        await becomes(lambda: min(asked["a"], asked["b"]) >= 2)
        silent = "a"
        await becomes(lambda: routed(fleet, b"", loads=loads) == ["b"])
        await asyncio.sleep(0.3)  # longer than one may be silent
        silent = "ab"
        before = asked["b"]
        await becomes(lambda: asked["b"] >= before + 3)
        assert routed(fleet, b"", loads=loads) == ["b"]
        fleet.update({}, ())


@pytest.mark.parametrize("answers", [True, False])
@in_real_time
async def test_a_replica_that_ends_each_connection_at_once_is_asked_twice_and_then_after_pauses(answers: bool) -> None:
    fleet, asked = quick(pause_seconds=600.0), Counter[str]()
    async with listening(lambda: asked.update("a") is None and answers, stays=False) as (_, port):
        fleet.update({"a": ("127.0.0.1", port)}, "a")
        await becomes(lambda: asked["a"] >= 2)
        await asyncio.sleep(0.1)
        assert asked["a"] == 2
        fleet.update({}, ())


class Name(str):
    """A name to which there are weak references."""


@in_real_time
async def test_nothing_is_kept_of_a_replica_that_is_gone_whether_it_had_an_address_or_was_ever_there() -> None:
    fleet = Fleet(slack=2)
    name, moved = Name("a"), Name("gone")
    fleet.update({}, [name])
    fleet.route(Question(PromptKeys(), "", "one"), {name: Load(1, 1)})
    fleet.route(Question(PromptKeys(), "", "two", moved), {name: Load(1, 1)})
    left = [weakref.ref(name), weakref.ref(moved)]
    del name, moved
    fleet.update({}, NAMES[1:])
    gc.collect()
    assert [ref() for ref in left] == [None, None]


@in_real_time
async def test_what_was_sent_to_a_replica_without_an_address_counts_while_it_is_there() -> None:
    fleet = Fleet(slack=2)
    loads = {"a": Load(0, 1), "b": Load(2, 1)}
    assert routed(fleet, b"", b"", loads=loads) == ["a", "a"]
    fleet.update({}, "ab")
    assert routed(fleet, b"", b"", loads=loads) == ["a", "b"]


@in_real_time
async def test_a_request_that_ended_two_replicas_is_refused_wherever_it_was_sent() -> None:
    fleet, bad = quick(), prompt("bad")
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
        fleet.route(Question(PromptKeys(), "", Question.of(bad).digest, other), IDLE)
        for name in (chosen, other):
            server, _ = servers[name]
            server.close()
        await becomes(lambda: refused() > 0)
        good = Question.of(prompt("good"))
        fleet.route(good, IDLE)
        assert not good.refused_for and good.replica not in (chosen, other)
        fleet.update({}, ())


def test_bodies_that_differ_beyond_what_the_router_sees_are_different_requests() -> None:
    assert Question.of(b"the same", truncated="8/10").digest != Question.of(b"the same", truncated="8/11").digest


def test_a_report_has_what_a_router_heard_of_before_its_first_one() -> None:
    fleet = Fleet(slack=2)
    for _ in range(8):
        fleet.note(Sent(b"", b"", b"", "a"))
    assert routed(fleet, b"", loads={"a": Load(5, 8), "b": Load(6, 8)}) == ["a"]
