from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from djl_trtllm.bench import session, session as module
from djl_trtllm.bench.apis import Requests, synthetic
from djl_trtllm.bench.client import Client, Target, clock
from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.session import Load, Plan, Progress, Result, Run, Sweep, find_knee, run
from djl_trtllm.errors import BenchmarkError
from tests.support.stub_http import Answer, Asked, OpenAiStub, streamed, stub_server, usage_events, whole
from tests.support.tables import by_rows


def plan(url: str, *loads: Load, **options: object) -> Plan:
    return Plan(Target.parse(url, {}), prompt_tokens=20, output_tokens=3, loads=loads, **options)  # type: ignore[arg-type]


def measured(made: Plan, show: object = None) -> tuple[Result, list[str]]:
    """The result, and what was said."""
    result = Result(made)
    said: list[str] = []
    asyncio.run(run(made, show or (lambda _: None), said.append, result))  # type: ignore[arg-type]
    return result, said


def fixed(clients: int, requests: int = 4) -> Load:
    return Load(concurrency=clients, requests=requests)


def test_loads_are_measured_one_after_another() -> None:
    stub = OpenAiStub()
    with stub.serving() as url:
        result, said = measured(plan(url, fixed(1), fixed(2)))
    assert [figures.label for figures in result.figures] == ["1 client", "2 clients"]
    assert [figures.succeeded for figures in result.figures] == [4, 4]
    assert (result.model, said, result.interrupted) == ("stub", [], False)


@pytest.mark.parametrize(
    ("tokenizer", "words", "notes"),
    [(True, 10, []), (False, 15, ["the server has no POST /tokenize: a word counts as 1.3 tokens"])],
)
def test_prompts_have_the_length_that_the_servers_tokenizer_counts(
    tokenizer: bool, words: int, notes: list[str]
) -> None:
    stub = OpenAiStub(tokenizer=tokenizer)
    with stub.serving() as url:
        result, said = measured(plan(url, fixed(1)))
    (message,) = stub.bodies[-1]["messages"]
    assert len(message["content"].split()) == words, "of 20 tokens; the stub has two tokens a word"
    assert result.notes == notes
    assert said == [f"note: {note}" for note in notes]


def test_a_file_of_prompts_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "from the file", "max_tokens": 2}\n')
    stub = OpenAiStub()
    with stub.serving() as url:
        result, _ = measured(plan(url, fixed(1), dataset=str(file)))
    assert stub.bodies[-1]["messages"] == [{"role": "user", "content": "from the file"}]
    assert result.figures[0].tokens == 8


def test_without_loads_a_sweep_is_made() -> None:
    with OpenAiStub().serving() as url:
        made = plan(url, most_clients=2, template=Load(duration=0.2))
        result, _ = measured(made)
    assert result.sweep is not None
    assert set(result.sweep.points) <= {1, 2}
    assert [figures.concurrency for figures in result.figures] == sorted(result.sweep.points)


def test_ctrl_c_ends_the_benchmark_with_what_there_is() -> None:
    before = signal.getsignal(signal.SIGINT)
    sent: list[int] = []

    def show(progress: Progress) -> None:
        if progress.figures.succeeded and not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    with OpenAiStub(seconds=0.01).serving() as url:
        result, _ = measured(plan(url, Load(concurrency=2, duration=600.0), fixed(1)), show)
    assert result.interrupted
    assert [figures.label for figures in result.figures] == ["2 clients"]
    assert result.figures[0].succeeded > 0
    assert not result.figures[0].complete
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("load", "needed"),
    [(Load(concurrency=3000), 3064), (Load(rate=2.0), 4160), (None, 264)],
    ids=["closed", "open", "sweep"],
)
def test_there_are_file_descriptors_for_all_connections(
    load: Load | None, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(session, "raise_limit", asked.append)
    loads = () if load is None else (Load(concurrency=2), load)
    with pytest.raises(BenchmarkError, match=r"127\.0\.0\.1:1/v1/chat/completions .*: connection refused"):
        measured(plan("http://127.0.0.1:1", *loads, model="m", most_clients=200))
    assert asked == [needed]


def test_ctrl_c_does_not_wait_for_a_server_that_counts_tokens() -> None:
    class Slow(OpenAiStub):
        async def tokenize(self, request: Request) -> Response:
            os.kill(os.getpid(), signal.SIGINT)
            await request.body()
            assert (await request.receive())["type"] == "http.disconnect"
            return Response()

    with Slow().serving() as url:
        result, said = measured(plan(url, fixed(1)))
    assert (result.interrupted, result.figures, said) == (True, [], [])


def swept(throughput: Callable[[int], float], most: int = 1024, stop_at: int | None = None) -> tuple[Sweep, list[int]]:
    """A sweep of a server with this throughput by number of clients, and the numbers in the order of measuring."""
    order: list[int] = []

    async def measure(clients: int) -> Figures:
        order.append(clients)
        figures = Figures(f"{clients} clients", begin=0.0, end=1.0, sent=1, tokens=round(1000 * throughput(clients)))
        figures.complete = clients != stop_at
        return figures

    sweep = Sweep()
    asyncio.run(find_knee(measure, most, sweep))
    return sweep, order


@by_rows("places", [1, 2, 3, 7, 12, 24, 60, 100, 256, 300])
def test_the_knee_is_within_ten_percent_of_the_places_of_the_batch(places: int) -> None:
    sweep, order = swept(lambda clients: 5.0 * min(clients, places))
    assert sweep.knee is not None
    assert places * 0.9 - 0.5 <= sweep.knee <= places * 1.1
    assert sweep.capacity == pytest.approx(5000.0 * places, rel=0.04)
    assert len(order) <= 16


@pytest.mark.parametrize("places", [24, 100])
def test_noise_of_some_percent_does_not_move_it_far(places: int) -> None:
    sweep, _ = swept(lambda clients: min(clients, places) * (1 + 0.03 * ((clients * 7919) % 3 - 1)))
    assert sweep.knee is not None
    assert places * 0.85 <= sweep.knee <= places * 1.15


def test_throughput_that_falls_under_load_has_its_knee_before() -> None:
    sweep, _ = swept(lambda clients: clients if clients <= 10 else 10 - clients / 100)
    assert sweep.knee is not None and 9 <= sweep.knee <= 11


def test_a_server_that_is_not_saturated_has_no_knee() -> None:
    sweep, order = swept(float, most=50)
    assert sweep.knee is None
    assert order == [1, 2, 4, 8, 16, 32, 50]
    assert swept(lambda clients: min(clients, 4))[1][:4] == [1, 2, 4, 8], "until that brings no more"


def test_an_interrupted_sweep_keeps_what_it_has() -> None:
    sweep, order = swept(float, stop_at=4)
    assert (sweep.knee, sorted(sweep.points), order) == (None, [1, 2, 4], [1, 2, 4])
    sweep, _ = swept(lambda clients: min(clients, 12), stop_at=11)
    assert (sweep.knee, 11 in sweep.points) == (None, True), "also between the numbers around the knee"


# -- loads -------------------------------------------------------------------------------------------------------------


def measured_load(
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
    figures = measured_load(counting(most), Load(concurrency=4, requests=20))
    assert max(most) == 4
    assert (figures.sent, figures.succeeded, figures.tokens, figures.complete) == (20, 20, 60, True)
    assert figures.concurrency == 4 and figures.label == "4 clients"
    assert Load(concurrency=1).label == "1 client"
    assert figures.begin + figures.e2e.most <= figures.end <= clock(), "measured up to the last token"


def test_requests_of_the_warm_up_are_not_measured_and_none_is_sent_before_it_is_due() -> None:
    for load in (Load(concurrency=2), Load(rate=50.0)):
        figures = measured_load(quick, replace(load, requests=5, warmup=0.3))
        assert figures.sent == figures.succeeded == 5
        assert figures.lag.least >= 0.0


def test_a_request_that_is_due_when_the_measurement_begins_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # Time stands still until the first request is due, and passes then: speeds that are shown are over time.
    times = chain([5.0] * 4, count(6.0))
    monkeypatch.setattr(module, "clock", lambda: next(times))
    assert measured_load(quick, Load(concurrency=1, requests=3)).sent == 3


def test_all_clients_have_begun_when_the_warm_up_ends() -> None:
    begun: list[float] = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        begun.append(clock())
        await asyncio.sleep(1.0)
        writer.write(streamed(*usage_events(1)))

    figures = measured_load(answer, Load(concurrency=4, duration=0.1, warmup=1.0, drain=30.0))
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

    figures = measured_load(answer, Load(rate=500.0, requests=15))
    assert (figures.succeeded, figures.rate, figures.label) == (15, 500.0, "500 requests/s")


def test_latencies_of_an_open_loop_include_what_waits_in_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IN_FLIGHT", 1)
    figures = measured_load(counting([], 0.05), Load(rate=1000.0, requests=10))
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

    figures = measured_load(answer, Load(concurrency=3, duration=1.0, drain=30.0))
    assert figures.seconds == pytest.approx(1.0)
    assert (figures.unfinished, figures.failed, figures.succeeded, figures.sent) == (0, 0, 6, 6)
    assert figures.tokens == 9, "the second responses came after the window"


def test_what_is_not_complete_after_the_drain_is_unfinished() -> None:
    async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    for load in (Load(concurrency=2, duration=0.2, drain=0.1), Load(rate=50.0, duration=0.2, drain=0.1)):
        figures = measured_load(never, load)
        assert figures.succeeded == figures.failed == 0
        assert figures.unfinished == figures.sent


def test_requests_that_were_due_and_never_sent_are_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IN_FLIGHT", 2)
    seen: list[Asked] = []

    async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(asked)
        await asyncio.sleep(60)

    figures = measured_load(never, Load(rate=200.0, duration=0.5, drain=0.1))
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

    figures = measured_load(answer, Load(concurrency=1, duration=600.0), stop=stop)
    assert not figures.complete
    assert (figures.succeeded, figures.unfinished) == (5, 1)
    assert figures.seconds < 600


def test_a_server_that_only_refuses_ends_the_load() -> None:
    async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(503, b"not ready"))

    figures = measured_load(refuse, Load(concurrency=1, duration=600.0))
    assert not figures.complete
    assert figures.errors == {"HTTP 503": 50}
    assert measured_load(refuse, Load(concurrency=1, requests=49)).complete


def test_refusals_beside_successes_do_not_end_it() -> None:
    seen: list[int] = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(1)
        writer.write(streamed(*usage_events(1)) if len(seen) == 1 else whole(429, b"full"))

    figures = measured_load(answer, Load(concurrency=40, requests=100))
    assert figures.complete
    assert (figures.succeeded, figures.errors["HTTP 429"]) == (1, 99)
    assert len(seen) == 100, "nothing is sent again"


def test_progress_has_what_runs_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK", 0.02)
    shares: dict[str, list[float]] = {}
    in_flight: list[int] = []
    speeds: list[float] = []

    def show(progress: Progress) -> None:
        shares.setdefault(progress.phase, []).append(progress.figures.cpu_share)
        in_flight.append(progress.in_flight)
        speeds.append(progress.tokens_per_second)

    figures = measured_load(counting([], 0.35), Load(concurrency=2, duration=0.3, warmup=0.2), show=show)
    assert 0 < figures.cpu_share < 2
    assert shares.keys() == {"warm-up", "measuring", "last responses"}
    # The share of a core is that of the measured time, and of all of it.
    assert len(set(shares["measuring"])) == len(shares["measuring"]) and len(set(shares["last responses"])) == 1
    assert max(in_flight) == 2
    # Three tokens come within a tick of at least 20 ms, and at most all six of both clients.
    assert 0 < max(speeds) <= 6 / 0.02


def test_an_error_of_the_client_itself_is_not_lost() -> None:
    async def main() -> None:
        requests = Requests(Client(Target("127.0.0.1", 1), 1.0), "chat", "m", {}, ignore_end=True)
        broken = synthetic(random.Random(1), 10, 3, 0.0)
        await Run(Load(concurrency=1), requests, broken, asyncio.Event(), random.Random(1)).measure(lambda _: None)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
