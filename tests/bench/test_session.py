from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from djl_trtllm.bench import session
from djl_trtllm.bench.client import Target
from djl_trtllm.bench.load import Load, Progress
from djl_trtllm.bench.session import Plan, Result, run
from djl_trtllm.errors import BenchmarkError
from tests.support.openai_stub import OpenAiStub


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


def test_prompts_have_the_length_that_the_servers_tokenizer_counts() -> None:
    stub = OpenAiStub()
    with stub.serving() as url:
        measured(plan(url, fixed(1)))
    (message,) = stub.bodies[-1]["messages"]
    assert len(message["content"].split()) == 10, "two tokens a word"


def test_without_the_servers_tokenizer_a_note_says_what_a_word_is() -> None:
    stub = OpenAiStub(tokenizer=False)
    with stub.serving() as url:
        result, said = measured(plan(url, fixed(1)))
    assert said == ["note: the server has no POST /tokenize: a word counts as 1.3 tokens"]
    assert result.notes == [said[0].removeprefix("note: ")]


def test_a_file_of_prompts_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "from the file", "max_tokens": 2}\n')
    stub = OpenAiStub()
    with stub.serving() as url:
        result, _ = measured(plan(url, fixed(1), dataset=str(file)))
    assert stub.bodies[-1]["messages"] == [{"role": "user", "content": "from the file"}]
    assert result.figures[0].tokens == 8


def test_conversations_have_lengths_of_their_own() -> None:
    stub = OpenAiStub()
    with stub.serving() as url:
        measured(plan(url, fixed(4, 20), dataset="sharegpt"))
    assert len({body["max_tokens"] for body in stub.bodies}) > 10


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


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(
        BenchmarkError, match=r"127\.0\.0\.1:1/v1/chat/completions does not answer .*connection refused"
    ):
        measured(plan("http://127.0.0.1:1", fixed(1), model="m"))


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
    with pytest.raises(BenchmarkError):
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
