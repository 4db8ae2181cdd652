"""The line of each request in the log, and the record of requests."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import stat
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.bench.apis import Prompt, read_prompts
from djl_trtllm.config import Options, load
from djl_trtllm.errors import BenchmarkError, ConfigError
from djl_trtllm.logs import JsonLines, request_id_of
from djl_trtllm.request import FinishReason, GenerationRequest, Pooling, Sampling
from djl_trtllm.telemetry import ServedRequest, Telemetry
from djl_trtllm.telemetry.reports import Asked, Generated, Recorder, RequestLog
from djl_trtllm.version import __version__
from tests.support.tables import by_rows
from tests.support.virtual_time import in_virtual_time
from tests.telemetry.requests import served, state


@by_rows(
    ("status", "failed"), [(200, False), (399, False), (400, True), (499, True), ("OK", False), ("UNAVAILABLE", True)]
)
def test_a_status_says_whether_the_request_failed(status: int | str, failed: bool) -> None:
    assert served(status=status).failed is failed


def test_a_request_that_never_was_queued_has_generated_nothing() -> None:
    assert served().generated() is None


def test_one_prompt_has_the_figures_of_its_record() -> None:
    assert served(state()).generated() == Generated(7, 5, 101.0, 103.0, 106.0, 110.0, ("length",))


def test_several_prompts_are_from_the_first_start_to_the_last_end() -> None:
    second = state(
        started=102.0, first_token_at=104.0, last_token_at=112.0, reason=FinishReason.ERROR, error="GenerationError"
    )
    third = state(started=None, first_token_at=None, last_token_at=None, generated_tokens=0, reason=None)
    request = served(state(), second, third)
    assert request.generated() == Generated(21, 10, 101.0, 102.0, 104.0, 112.0, ("length", "error"))
    assert request.any_error() == "GenerationError"


def test_what_did_not_happen_has_no_time() -> None:
    waiting = state(started=None, first_token_at=None, last_token_at=None, generated_tokens=0, reason=None)
    assert served(waiting).generated() == Generated(7, 0, 101.0, None, None, None, ())


def test_what_was_asked_has_the_names_of_the_conventions() -> None:
    sampled = Sampling(max_new_tokens=9, do_sample=True, temperature=0.5, top_p=0.9, n=2)
    assert Asked.of(GenerationRequest(prompt="x", sampling=sampled)) == Asked("text_completion", 9, 0.5, 0.9, 2)
    greedy = GenerationRequest(messages=[], default_new_tokens=30)
    assert Asked.of(greedy) == Asked("chat", 30, 0.0, 1.0, 1)


def test_a_request_is_one_whose_client_left_until_there_is_a_status() -> None:
    request = ServedRequest("r-1", "GET", "/")
    assert (request.status, request.reads, request.quiet, request.generated()) == (499, False, False, None)


NOW = 112.5


def lines_of(
    caplog: pytest.LogCaptureFixture, *requests: ServedRequest, level: int = logging.DEBUG
) -> list[logging.LogRecord]:
    caplog.set_level(level, "djl_trtllm.requests")
    caplog.clear()
    log = RequestLog(lambda: NOW)

    async def write() -> None:
        for request in requests:
            log.write(request, {})

    asyncio.run(write())
    return list(caplog.records)


def line_of(caplog: pytest.LogCaptureFixture, request: ServedRequest) -> str:
    (line,) = lines_of(caplog, request)
    return line.getMessage()


def test_a_request_that_generated_has_its_numbers_and_none_of_its_text(caplog: pytest.LogCaptureFixture) -> None:
    assert line_of(caplog, served(state())) == (
        "POST /invocations 200 model=story dialect=lmi prompt_tokens=7 output_tokens=5 queue_seconds=2.0 "
        "ttft_seconds=6.0 finish_reason=length total_seconds=12.5"
    )


def test_the_line_has_each_number_as_a_field_and_the_id_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(caplog, served(state()))
    fields: dict[str, Any] = {
        "method": "POST",
        "path": "/invocations",
        "status": 200,
        "model": "story",
        "dialect": "lmi",
        "prompt_tokens": 7,
        "output_tokens": 5,
        "queue_seconds": 2.0,
        "ttft_seconds": 6.0,
        "total_seconds": 12.5,
        "finish_reason": "length",
    }
    assert fields.items() <= vars(line).items()
    assert (request_id_of(line), line.levelno, line.name) == ("r-1", logging.INFO, "djl_trtllm.requests")


def test_in_json_the_fields_are_not_repeated_in_the_message(caplog: pytest.LogCaptureFixture) -> None:
    chat = served(state(), path="/v1/chat/completions", model="tiny-stories", dialect="openai", client="web-app")
    (record,) = lines_of(caplog, chat)
    assert "prompt_tokens=7" in record.getMessage(), "text, and a program's own log, have only the message"
    line = JsonLines().format(record)
    assert json.loads(line)["message"] == "request"
    assert line.count("tiny-stories") == line.count("prompt_tokens") == 1
    assert len(line) <= 350
    began = ["time", "level", "message", "request_id", "method", "path", "status", "model", "dialect", "client"]
    assert list(json.loads(line))[:10] == began, "those that say which request it was are first"


def test_a_refusal_has_its_status_and_the_class_of_its_error(caplog: pytest.LogCaptureFixture) -> None:
    refused = served(status=503, error="OverloadedError")
    assert line_of(caplog, refused) == (
        "POST /invocations 503 model=story dialect=lmi error=OverloadedError total_seconds=12.5"
    )


def test_a_line_has_its_client(caplog: pytest.LogCaptureFixture) -> None:
    assert " dialect=lmi client=web-app prompt_tokens=" in line_of(caplog, served(state(), client="web-app"))


@pytest.mark.parametrize(("reseeded", "shown"), [((False, False), False), ((False, True), True)])
def test_a_request_that_went_on_in_another_engine_process_says_how_often(
    caplog: pytest.LogCaptureFixture, reseeded: tuple[bool, bool], shown: bool
) -> None:
    text = line_of(caplog, served(*(state(resumes=2, reseeded=each) for each in reseeded)))
    assert f" resumes=4 reseeded={shown} " in text


def test_a_line_has_the_tokens_of_drafts_where_the_engine_counts_them(caplog: pytest.LogCaptureFixture) -> None:
    drafting = [state(accepted_tokens=3, drafted_tokens=8), state(accepted_tokens=1, drafted_tokens=2)]
    assert " accepted_tokens=4 drafted_tokens=10 " in line_of(caplog, served(*drafting))
    assert "drafted_tokens" not in line_of(caplog, served(*drafting, state(accepted_tokens=3)))


def test_sequences_that_ended_differently_have_all_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    text = line_of(caplog, served(state(), state(reason=FinishReason.END_TOKEN)))
    assert " finish_reason=length,eos_token " in text


def test_an_error_while_it_generated_is_that_of_its_record(caplog: pytest.LogCaptureFixture) -> None:
    assert " error=GenerationError " in line_of(caplog, served(state(error="GenerationError")))


def test_a_request_that_waited_to_its_end_has_no_times_of_what_did_not_happen(caplog: pytest.LogCaptureFixture) -> None:
    text = line_of(caplog, served(state(started=None, first_token_at=None, last_token_at=None)))
    assert "queue_seconds" not in text
    assert "ttft_seconds" not in text


def test_what_a_client_names_is_quoted_and_no_longer_than_a_line(caplog: pytest.LogCaptureFixture) -> None:
    names = {"model": 'a b=1 "x"\nINFO forged', "path": "/" + "x" * 5000, "client": "y" * 5000}
    text = line_of(caplog, served(status=404, **names))
    assert '"a b=1 \\"x\\"\\\\nINFO forged"' in text
    assert "\n" not in text
    assert len(text) < 500


def test_a_path_cannot_look_like_the_rest_of_the_line(caplog: pytest.LogCaptureFixture) -> None:
    text = line_of(caplog, served(status=404, path="/x 200 model=forged", model=""))
    assert text == 'POST "/x 200 model=forged" 404 dialect=lmi total_seconds=12.5'


def test_health_checks_and_pages_that_were_read_are_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    shown = [
        served(status=503, quiet=True),
        served(status=200, reads=True),
        served(status=404, reads=True),
        served(status=200),
    ]
    assert [line.levelno for line in lines_of(caplog, *shown)] == [10, 10, 20, 20]
    assert len(lines_of(caplog, *shown, level=logging.INFO)) == 2
    assert lines_of(caplog, *shown, level=logging.WARNING) == []


def test_a_flood_of_refusals_is_ten_lines_a_second_and_a_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "djl_trtllm.requests")

    async def flood() -> None:
        log = RequestLog(asyncio.get_running_loop().time)
        for _ in range(2):
            for number in range(1000):
                refused = served(status=503 if number % 4 else 429, client="a flood" if number % 5 else "light")
                log.write(refused, {})
            await asyncio.sleep(1.5)

    in_virtual_time(flood)()
    texts = [line.getMessage() for line in caplog.records]
    count = "990 more requests did not generate and have no line: 247 with 429, 743 with 503"
    count += '; 792 of client="a flood"'
    assert texts[10] == texts[21] == count
    assert len(texts) == 22


def test_a_number_that_was_written_early_is_not_written_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "djl_trtllm.requests")

    async def flood() -> None:
        log = RequestLog(asyncio.get_running_loop().time)
        for _ in range(12):
            log.write(served(status=503), {})
        log.flush()
        await asyncio.sleep(1.5)

    in_virtual_time(flood)()
    texts = [line.getMessage() for line in caplog.records]
    assert texts[10:] == ["2 more requests did not generate and have no line: 2 with 503"]


def test_requests_that_generated_have_a_line_each_in_a_flood_too(caplog: pytest.LogCaptureFixture) -> None:
    assert len(lines_of(caplog, *[served(state())] * 50)) == 50


def test_of_the_requests_that_succeed_a_share_has_lines_and_all_that_fail(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "djl_trtllm.requests")
    log = RequestLog(lambda: NOW, share=0.25, chance=iter([0.2, 0.25, 0.9]).__next__)
    failed = served(state(reason=FinishReason.ERROR, error="GenerationError"), id="broken")
    for request in (*(served(state(), id=name) for name in "abc"), failed, served(state(), status=500, id="failed")):
        log.write(request, {})
    assert [request_id_of(line) for line in caplog.records] == ["a", "broken", "failed"]


def test_successes_without_a_line_take_none_of_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "djl_trtllm.requests")
    log = RequestLog(lambda: NOW, share=0.1, chance=lambda: 0.5)
    for _ in range(50):
        log.write(served(status=200), {})
    log.write(served(status=503, id="refused"), {})
    log.flush()
    assert [request_id_of(line) for line in caplog.records] == ["refused"]


def test_an_error_after_the_status_has_its_line_whatever_the_share(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "djl_trtllm.requests")
    log = RequestLog(lambda: NOW, share=0.1, chance=lambda: 0.5)
    log.write(served(status=200, error="GuideError"), {})
    assert len(caplog.records) == 1


def test_a_request_without_an_id_belongs_to_none(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(caplog, served(status=400, id=""))
    assert not hasattr(line, "request_id")


IDS = [1, 504, 563]
ASKED = GenerationRequest(
    prompt="a secret",
    stop=("a secret stop",),
    adapter="poems",
    sampling=Sampling(max_new_tokens=50, do_sample=True, temperature=0.5),
)


def ran(seed: int | None = 7) -> RequestState:
    """A state with a sequence of 5 tokens."""
    sequence = SimpleNamespace(token_ids=[9] * 5, prompt_ids=array("i", IDS), seed=seed)  # as a rolling batch keeps it
    return cast(RequestState, SimpleNamespace(record=state().record, sequences=[sequence]))


def options(path: Path, **changes: Any) -> Options:
    return Options(record_file=path / "requests.jsonl", record_share=1.0, **changes)


def recorded(path: Path, *requests: GenerationRequest, **changes: Any) -> list[dict[str, Any]]:
    """The lines that requests leave, each the only one of its call."""
    telemetry = Telemetry(record=Recorder(options(path, **changes)))
    for request in requests:
        call = served(ran(), asked=None)
        telemetry.began(call, (request,))
        telemetry.ended(call)
    telemetry.close()
    return [json.loads(line) for line in (path / "requests.jsonl").read_text().splitlines()]


def test_an_entry_has_ids_sampling_seed_and_versions_and_nothing_of_the_prompt(tmp_path: Path) -> None:
    (entry,) = recorded(tmp_path, ASKED)
    assert "secret" not in json.dumps(entry)
    assert entry.pop("time") > 1.7e9
    assert entry.pop("versions")["djl-trtllm"] == __version__
    assert entry == {
        "id": "r-1",
        "model": "story",
        "dialect": "lmi",
        "prompt_tokens": 7,
        "output_tokens": 5,
        "max_tokens": 5,
        "finish_reason": "length",
        "parameters": {"do_sample": True, "temperature": 0.5, "seed": 7, "adapters": "poems"},
    }


@pytest.mark.parametrize(
    ("prompts", "found"),
    [("lengths", {}), ("ids", {"prompt_ids": IDS}), ("text", {"prompt_ids": IDS, "prompt": "a secret"})],
)
def test_prompts_are_in_it_as_far_as_the_operator_says(tmp_path: Path, prompts: str, found: dict[str, Any]) -> None:
    (entry,) = recorded(tmp_path, ASKED, record_prompts=prompts)
    assert {name: value for name, value in entry.items() if name in ("prompt", "messages", "prompt_ids")} == found


def test_messages_are_in_it_as_they_came(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "böse"}]
    (entry,) = recorded(tmp_path, GenerationRequest(messages=messages), record_prompts="text")
    assert entry["messages"] == messages


def test_a_share_of_the_requests_is_chosen() -> None:
    chosen = Recorder(Options(record_file=Path("/dev/null"), record_share=0.25), random.Random(3))
    assert sum(chosen.chooses() for _ in range(4000)) == pytest.approx(1000, rel=0.1)
    chosen.close()


def test_what_is_not_chosen_and_what_never_ran_leaves_nothing(tmp_path: Path) -> None:
    telemetry = Telemetry(record=Recorder(options(tmp_path, record_prompts="text")))
    refused, other = served(), served(ran())
    telemetry.began(refused, (ASKED,))
    for each in (refused, other):
        telemetry.ended(each)
    telemetry.close()
    assert (tmp_path / "requests.jsonl").read_text() == ""


def test_a_text_that_becomes_a_vector_is_not_in_it(tmp_path: Path) -> None:
    (entry,) = recorded(tmp_path, GenerationRequest(prompt="a text", pooling=Pooling()), ASKED)
    assert entry["parameters"]["adapters"] == "poems"


def test_without_a_file_no_request_is_kept() -> None:
    request = ServedRequest("r-1", "POST", "/invocations")
    Telemetry().began(request, (ASKED,))
    assert (request.recorded, request.asked) == ((), None)


def test_the_files_never_take_more_than_twice_the_bound(tmp_path: Path) -> None:
    """The last entry alone is larger than the bound, in bytes and not in characters, and loses its prompt."""
    small = [GenerationRequest(prompt=f"é {number}") for number in range(40)]
    large = GenerationRequest(prompt="é" * 3000)
    entries = recorded(tmp_path, *small, large, record_prompts="text", record_max_bytes=4096)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"requests.jsonl", "requests.jsonl.1"}
    assert max(sizes.values()) <= 4096
    assert "prompt" in entries[0] and "prompt" not in entries[-1]


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    recorded(tmp_path, ASKED)
    assert stat.S_IMODE((tmp_path / "requests.jsonl").stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_file=.*nowhere.*cannot write it"):
        Telemetry.open(options(tmp_path / "nowhere"), {})


def test_a_disk_that_is_full_costs_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(record=Recorder(Options(record_file=Path("/dev/full"), record_share=1.0)))
    for _ in range(3):
        call = served(ran())
        telemetry.began(call, (ASKED,))
        telemetry.ended(call)
    telemetry.close()
    assert caplog.text.count("/dev/full: requests could not be recorded") == 1


def test_a_model_cannot_switch_it_on(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("record_file=/tmp/requests.jsonl\n")
    with pytest.raises(ConfigError, match="only by the environment variable SERVING_RECORD_FILE"):
        load(tmp_path, {})


def test_a_record_is_replayed(tmp_path: Path) -> None:
    asked = {"do_sample": True, "temperature": 0.5, "seed": 7, "adapters": "poems"}
    for prompts, expected in (
        ("lengths", Prompt(5, tokens=7, parameters=asked)),
        ("ids", Prompt(5, ids=IDS, parameters=asked)),
        ("text", Prompt(5, "a secret", ids=IDS, parameters=asked)),
    ):
        folder = tmp_path / prompts
        folder.mkdir()
        recorded(folder, ASKED, record_prompts=prompts)
        assert read_prompts(folder / "requests.jsonl", 1, "--prompts") == [expected]


def test_a_record_of_nothing_is_no_prompts(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(BenchmarkError, match="no prompts"):
        read_prompts(tmp_path / "requests.jsonl", 1, "--prompts")
