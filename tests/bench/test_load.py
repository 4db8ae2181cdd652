from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from djl_trtllm.bench import session as module
from djl_trtllm.bench.apis import Requests, synthetic
from djl_trtllm.bench.client import Client, Target, clock
from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.session import Load, Progress, Run
from tests.support.stub_http import Answer, Asked, streamed, stub_server, usage_events, whole


def measured(
    answer: Answer, load: Load, *, stop: asyncio.Event | None = None, show: Callable[[Progress], None] | None = None
) -> Figures:
    """What a load measures of a server that answers so."""

    async def main() -> Figures:
        async with stub_server(answer) as port:
            requests = Requests(Client(Target("127.0.0.1", port), 30.0), "chat", "m", {}, ignore_end=True)
            chance = random.Random(1)
            prompts = synthetic(chance, 10, 3, 1.3)
            return await Run(load, requests, prompts, stop or asyncio.Event(), chance).measure(show or (lambda _: None))

    return asyncio.run(main())


async def quick(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(streamed(*usage_events(3)))


def counting(most: list[int], seconds: float = 0.01) -> Answer:
    """An answer that notes how many requests were open at once."""
    open_now = 0

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        most.append(open_now)
        await asyncio.sleep(seconds)
        open_now -= 1
        writer.write(streamed(*usage_events(3)))

    return answer


def test_a_closed_loop_has_as_many_requests_open_as_clients() -> None:
    most: list[int] = []
    figures = measured(counting(most), Load(concurrency=4, duration=None, requests=20, warmup=0.0))
    assert max(most) == 4
    assert (figures.sent, figures.succeeded, figures.tokens, figures.complete) == (20, 20, 60, True)
    assert figures.concurrency == 4 and figures.label == "4 clients"
    assert Load(concurrency=1).label == "1 client"
    assert figures.begin + figures.e2e.most <= figures.end <= clock(), "measured up to the last token"


def test_requests_of_the_warm_up_are_not_measured_and_none_is_sent_before_it_is_due() -> None:
    for load in (Load(concurrency=2), Load(rate=50.0)):
        figures = measured(quick, replace(load, duration=None, requests=5, warmup=0.3))
        assert figures.sent == figures.succeeded == 5
        assert figures.lag.least >= 0.0


def test_all_clients_have_begun_when_the_warm_up_ends() -> None:
    begun: list[float] = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        begun.append(clock())
        await asyncio.sleep(1.0)
        writer.write(streamed(*usage_events(1)))

    figures = measured(answer, Load(concurrency=4, duration=0.1, warmup=1.0, drain=30.0))
    assert begun[0] < begun[3] < figures.begin


def test_an_open_loop_sends_although_nothing_is_answered() -> None:
    arrived = asyncio.Event()
    seen: list[Asked] = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(asked)
        if len(seen) == 15:
            arrived.set()
        await arrived.wait()
        writer.write(streamed(*usage_events(1)))

    figures = measured(answer, Load(rate=500.0, duration=None, requests=15, warmup=0.0))
    assert (figures.succeeded, figures.rate, figures.label) == (15, 500.0, "500 requests/s")


def test_latencies_of_an_open_loop_include_what_waits_in_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IN_FLIGHT", 1)
    figures = measured(counting([], 0.05), Load(rate=1000.0, duration=None, requests=10, warmup=0.0))
    # The last of ten was due after some ten milliseconds, and could be sent after nine others of 50 ms.
    assert figures.e2e.most > 0.25
    assert figures.lag.most > 0.2


def test_a_duration_ends_the_load_and_the_last_responses_are_awaited() -> None:
    begun: list[float] = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        begun.append(clock())
        if len(begun) > 3:
            await asyncio.sleep(begun[0] + 1.3 - clock())
        writer.write(streamed(*usage_events(3)))

    figures = measured(answer, Load(concurrency=3, duration=1.0, warmup=0.0, drain=30.0))
    assert figures.seconds == pytest.approx(1.0)
    assert (figures.unfinished, figures.failed, figures.succeeded, figures.sent) == (0, 0, 6, 6)
    assert figures.tokens == 9, "the second responses came after the window"


def test_what_is_not_complete_after_the_drain_is_unfinished() -> None:
    async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    for load in (Load(concurrency=2, duration=0.2, warmup=0.0, drain=0.1), Load(rate=50.0, duration=0.2, drain=0.1)):
        figures = measured(never, load)
        assert figures.succeeded == figures.failed == 0
        assert figures.unfinished == figures.sent


def test_requests_that_were_due_and_never_sent_are_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IN_FLIGHT", 2)
    seen: list[Asked] = []

    async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(asked)
        await asyncio.sleep(60)

    figures = measured(never, Load(rate=200.0, duration=0.5, warmup=0.0, drain=0.1))
    assert len(seen) == 2
    assert figures.unfinished == figures.sent == pytest.approx(100, rel=0.4), "200 a second for half a second"
    assert figures.lag.most > 0.4


def test_a_stop_ends_the_load_with_what_there_is() -> None:
    stop = asyncio.Event()
    seen: list[int] = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(1)
        if len(seen) == 6:
            stop.set()
            await asyncio.sleep(60)
        writer.write(streamed(*usage_events(3)))

    figures = measured(answer, Load(concurrency=1, duration=600.0, warmup=0.0), stop=stop)
    assert not figures.complete
    assert (figures.succeeded, figures.unfinished) == (5, 1)
    assert figures.seconds < 600


def test_a_server_that_only_refuses_ends_the_load() -> None:
    async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(503, b"not ready"))

    figures = measured(refuse, Load(concurrency=1, duration=600.0, warmup=0.0))
    assert not figures.complete
    assert figures.errors == {"HTTP 503": 50}


def test_refusals_beside_successes_do_not_end_it() -> None:
    seen: list[int] = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(1)
        writer.write(streamed(*usage_events(1)) if len(seen) == 1 else whole(429, b"full"))

    figures = measured(answer, Load(concurrency=40, duration=None, requests=100, warmup=0.0))
    assert figures.complete
    assert (figures.succeeded, figures.errors["HTTP 429"]) == (1, 99)
    assert len(seen) == 100, "nothing is sent again"


def test_progress_has_what_runs_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK", 0.02)
    phases: set[str] = set()
    in_flight: list[int] = []
    speeds: list[float] = []

    def show(progress: Progress) -> None:
        phases.add(progress.phase)
        in_flight.append(progress.in_flight)
        speeds.append(progress.tokens_per_second)

    figures = measured(counting([], 0.35), Load(concurrency=2, duration=0.3, warmup=0.2), show=show)
    assert 0 < figures.cpu_share < 2
    assert phases == {"warm-up", "measuring", "last responses"}
    assert max(in_flight) == 2
    # Three tokens come within a tick of at least 20 ms, and at most all six of both clients.
    assert 0 < max(speeds) <= 6 / 0.02


def test_an_error_of_the_client_itself_is_not_lost() -> None:
    async def main() -> None:
        requests = Requests(Client(Target("127.0.0.1", 1), 1.0), "chat", "m", {}, ignore_end=True)
        broken = synthetic(random.Random(1), 10, 3, 0.0)
        await Run(Load(concurrency=1, warmup=0.0), requests, broken, asyncio.Event(), random.Random(1)).measure(
            lambda _: None
        )

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
