"""What clients get when processes die, in both modes."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.integration.djl.conftest import Start
from tests.integration.djl.engines import DjlAnswer, JavaEngine, Ranks, djl_model
from tests.support.client import body
from tests.support.processes import survivors, wait_until
from tests.support.server import START_SECONDS

pytestmark = pytest.mark.slow

_SLOW = {"steps_per_second": 20}
_OPTIONS = {"option.max_rolling_batch_size": 64}


def _running(engine: JavaEngine, count: int) -> list[DjlAnswer]:
    answers = [engine.request(body(3000, stream=True)) for _ in range(count)]
    wait_until(lambda: all(answer.chunks for answer in answers), what="a token for each")
    return answers


def _has_another_host(engine: JavaEngine, pid: int) -> bool:
    try:
        return bool(engine.host().pid != pid)
    except (ValueError, psutil.Error):  # there is none
        return False


def _next_succeeds(engine: JavaEngine) -> None:
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


@pytest.mark.parametrize("mode", ["async"], indirect=True)
def test_every_request_ends_when_the_engine_process_is_killed_and_none_may_go_on(start: Start) -> None:
    engine = start(_SLOW, **_OPTIONS, **{"option.resume_after_restart": "false"})
    whole = [engine.request(body(3000)) for _ in range(8)]
    streams = _running(engine, 56)
    # When a stream that was sent last is well under way, so are they.
    wait_until(lambda: len(streams[-1].chunks) > 20, what="20 tokens")
    engine.host().kill()
    for answer in streams:
        last = json.loads(answer.wait().body.splitlines()[-1])
        assert last["details"]["finish_reason"] == "error"
        assert "SIGKILL" in last["token"]["error_msg"]
    for answer in whole:
        assert answer.wait().code == 424
        assert "may be repeated" in json.loads(answer.body)["error"]
    _next_succeeds(engine)


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


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_a_model_that_cannot_be_loaded_says_why(start: Start) -> None:
    with pytest.raises(RuntimeError, match="no such engine"):
        start({"start_error": "no such engine"})


def test_in_async_mode_djls_python_engine_is_told_why_a_model_cannot_be_loaded(tmp_path: Path) -> None:
    # Under DJL's Java engine, loading had not ended after three minutes.
    with pytest.raises(AssertionError, match=r"not loaded: 500 .*no such engine"):
        Ranks(djl_model(tmp_path / "model", "async", {"start_error": "no such engine"}), "async", 1)
