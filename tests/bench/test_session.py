from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from djl_trtllm.bench import session
from djl_trtllm.bench.client import Target
from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.session import Load, Plan, Progress, Result, Sweep, find_knee, run
from djl_trtllm.errors import BenchmarkError
from tests.support.stub_http import OpenAiStub


def plan(url: str, *loads: Load, **options: object) -> Plan:
    return Plan(Target.parse(url, {}), prompt_tokens=20, output_tokens=3, loads=loads, **options)  # type: ignore[arg-type]


def measured(made: Plan, show: object = None) -> tuple[Result, list[str]]:
    """The result, and what was said."""
    result = Result(made)
    said: list[str] = []
    asyncio.run(run(made, show or (lambda _: None), said.append, result))  # type: ignore[arg-type]
    return result, said


def fixed(clients: int, requests: int = 4) -> Load:
    return Load(concurrency=clients, duration=None, requests=requests, warmup=0.0)


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
        made = plan(url, most_clients=2, template=Load(duration=0.2, warmup=0.0))
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
        result, _ = measured(plan(url, Load(concurrency=2, duration=600.0, warmup=0.0), fixed(1)), show)
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


@pytest.mark.parametrize("places", [1, 2, 3, 7, 12, 24, 60, 100, 256, 300])
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
