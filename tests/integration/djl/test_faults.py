"""What clients get when processes die, in both modes."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.integration.djl.conftest import Start
from tests.integration.djl.engines import DjlAnswer, JavaEngine, SocketEngine, djl_model
from tests.support.client import body
from tests.support.processes import survivors, wait_until
from tests.support.server import START_SECONDS

pytestmark = pytest.mark.slow

_SLOW = {"steps_per_second": 20}
_OPTIONS = {"option.max_rolling_batch_size": 64}
_ENDING = {**_OPTIONS, "option.resume_after_restart": "false"}


def _running(engine: JavaEngine | SocketEngine, count: int) -> list[DjlAnswer]:
    answers = [engine.request(body(3000, stream=True)) for _ in range(count)]
    wait_until(lambda: all(answer.chunks for answer in answers), what="a token for each")
    return answers


def _has_another_host(engine: JavaEngine | SocketEngine, pid: int) -> bool:
    try:
        return bool(engine.host().pid != pid)
    except (ValueError, psutil.Error):  # there is none
        return False


def _next_succeeds(engine: JavaEngine | SocketEngine) -> None:
    def succeeds() -> bool:
        answer = engine.request(body(3)).wait()
        if answer.code != 200 or answer.error:
            return False
        assert "generated_text" in json.loads(answer.body)
        return True

    wait_until(succeeds, START_SECONDS, "a request that succeeds")


def test_every_stream_goes_on_when_the_engine_process_is_killed(start: Start) -> None:
    engine = start({"steps_per_second": 100}, **_OPTIONS)
    whole = engine.request(body(300, stream=True)).wait().body
    answers = [engine.request(body(300, stream=True)) for _ in range(64)]
    for _ in range(2):
        dead = engine.host()
        dead.kill()
        wait_until(lambda: _has_another_host(engine, dead.pid), what="a new engine process")  # noqa: B023
    assert [answer.wait().body for answer in answers] == [whole] * 64


def test_every_stream_ends_when_the_engine_process_is_killed_and_none_may_go_on(start: Start) -> None:
    engine = start(_SLOW, **_ENDING)
    answers = _running(engine, 64)
    engine.host().kill()
    for answer in answers:
        last = json.loads(answer.wait().body.splitlines()[-1])
        assert last["details"]["finish_reason"] == "error"
        assert "SIGKILL" in last["token"]["error_msg"]
    _next_succeeds(engine)


@pytest.mark.parametrize("start", ["java"], indirect=True)
def test_a_whole_answer_gets_a_status_when_the_engine_process_is_killed(start: Start) -> None:
    engine = start(_SLOW, **_ENDING)
    answers = [engine.request(body(3000)) for _ in range(8)]
    # When a stream that was sent last is well under way, so are they.
    last = engine.request(body(3000, stream=True))
    wait_until(lambda: len(last.chunks) > 20, what="20 tokens")
    engine.host().kill()
    for answer in answers:
        assert answer.wait().code == 424
        assert "may be repeated" in json.loads(answer.body)["error"]


@pytest.mark.parametrize("mode", ["async"], indirect=True)
def test_every_stream_ends_when_djls_worker_is_killed(mode: str, tmp_path: Path) -> None:
    with JavaEngine(djl_model(tmp_path / "model", mode, _SLOW, **_OPTIONS)) as engine:
        answers = _running(engine, 64)
        host = engine.host()
        engine.worker().kill()
        for answer in answers:
            assert b"Inference Engine Failure" in answer.wait().body
        assert survivors([host]) == []
        _next_succeeds(engine)


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_a_model_that_has_failed_is_started_anew(start: Start) -> None:
    faults = [{"action": "die", "at_token": 2, "max_new_tokens": 9}]
    engine = start({"faults": faults}, retry_threshold=0)
    assert engine.request(body(9)).wait().code == 424
    answer = engine.request(body(3)).wait()
    assert (answer.code, "has failed" in answer.body.decode()) == (503, True)
    _next_succeeds(engine)


@pytest.mark.parametrize("start", ["java"], indirect=True)
def test_a_failing_request_costs_the_others_nothing(start: Start) -> None:
    script = {"steps_per_second": 100, "faults": [{"action": "error", "at_token": 3, "max_new_tokens": 77}]}
    engine = start(script, **_OPTIONS)
    good = [engine.request(body(40, stream=True)) for _ in range(10)]
    bad = engine.request(body(77, stream=True))
    whole = engine.request(body(77))
    unreadable = engine.request(b"{")
    assert all(answer.wait().body.count(b"\n") == 40 for answer in good)
    assert json.loads(bad.wait().body.splitlines()[-1])["details"]["finish_reason"] == "error"
    assert whole.wait().code == unreadable.wait().code == 424


@pytest.mark.parametrize("tell", [True, False])
def test_requests_that_djl_has_forgotten_are_cancelled(tmp_path: Path, tell: bool) -> None:
    model = djl_model(tmp_path / "model", "rolling", _SLOW, **{"option.max_rolling_batch_size": 2})
    with SocketEngine(model, "rolling") as engine:
        _running(engine, 2)
        engine.forget(tell=tell)
        # They held both places, and for minutes.
        for answer in [engine.request(body(5)) for _ in range(2)]:
            assert answer.wait().code == 200
        assert "2 running requests" in engine.log()


@pytest.mark.parametrize("mode", ["rolling", "async"], indirect=True)
def test_a_model_that_cannot_be_loaded_says_why(mode: str, tmp_path: Path) -> None:
    model = djl_model(tmp_path / "model", mode, {"start_error": "no such engine"})
    with pytest.raises(AssertionError, match="no such engine"):
        SocketEngine(model, mode)
