from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.config import load
from djl_trtllm.telemetry import ServedRequest, Telemetry
from djl_trtllm.telemetry import telemetry as telemetry_module
from djl_trtllm.telemetry.request_log import RequestLog
from tests.telemetry.requests import served, state


class Traced:
    def __init__(self, error: Exception | None = None) -> None:
        self.requests: list[ServedRequest] = []
        self.closed = False
        self._error = error

    def record(self, request: ServedRequest) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        self.requests.append(request)
        return {"trace_id": "7"}

    def close(self) -> None:
        self.closed = True


def report(telemetry: Telemetry, request: ServedRequest) -> None:
    async def ended() -> None:
        telemetry.ended(request)

    asyncio.run(ended())


def test_the_line_of_a_request_names_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    traced = Traced()
    request = served(state())
    telemetry = Telemetry(RequestLog(), traced)
    report(telemetry, request)
    assert traced.requests == [request]
    assert caplog.records[0].getMessage().endswith(" trace_id=7")
    telemetry.close()
    assert traced.closed


class Measured:
    def __init__(self) -> None:
        self.requests: list[ServedRequest] = []
        self.closed = False

    def record(self, request: ServedRequest) -> None:
        self.requests.append(request)

    def close(self) -> None:
        self.closed = True


def test_a_request_is_measured_with_and_without_a_line_and_a_trace() -> None:
    for log, traced in ((None, None), (RequestLog(), Traced())):
        measured = Measured()
        request = served(state())
        telemetry = Telemetry(log, traced, measured)
        report(telemetry, request)
        assert measured.requests == [request]
        telemetry.close()
        assert measured.closed


def test_the_end_waits_for_what_is_sent_but_not_for_a_collector_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    waited: list[float] = []

    class Waiting(Traced):
        def close(self) -> None:
            assert threading.current_thread().daemon, "the process ends without it"
            answers.wait(60)
            self.closed = True

    def join(thread: threading.Thread, timeout: float) -> None:
        waited.append(timeout)
        if answers.is_set():
            joined(thread)

    joined = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.setattr(telemetry_module, "time", SimpleNamespace(monotonic=iter((10.0, 10.0, 12.0, 0, 0, 9)).__next__))
    traced, metrics = Waiting(), Measured()
    Telemetry(None, traced, metrics).close()
    assert not traced.closed
    assert waited == [3.0, 1.0], "together"
    answers.set()
    traced = Waiting()
    Telemetry(None, traced, metrics).close()
    assert traced.closed
    assert waited[2:] == [3.0, 0.0]


def test_the_log_of_requests_may_be_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    environ = {"SERVING_REQUEST_LOG": "false"}
    report(Telemetry.open(load(None, environ).options, environ), served(state()))
    assert [line for line in caplog.records if line.name == "djl_trtllm.requests"] == []


def test_the_log_of_requests_is_on_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report(Telemetry.open(load(None, {}).options, {}), served(state()))
    assert len(caplog.records) == 1


def test_what_goes_wrong_while_telling_does_not_reach_the_request(caplog: pytest.LogCaptureFixture) -> None:
    report(Telemetry(RequestLog(), Traced(ValueError("wrong"))), served(state()))
    assert [line.levelname for line in caplog.records] == ["ERROR"]
    assert caplog.records[0].request_id == "r-1"  # type: ignore[attr-defined]


def test_what_is_reported_soon_has_what_happens_until_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    request = served(state(), status=499)

    async def ended() -> None:
        Telemetry(RequestLog()).ended_soon(request)
        request.status = 200
        await asyncio.sleep(0)

    asyncio.run(ended())
    assert caplog.records[0].getMessage().startswith("POST /invocations 200 ")


def test_the_end_writes_how_many_requests_have_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def flood() -> None:
        telemetry = Telemetry(RequestLog())
        for _ in range(11):
            telemetry.ended(served(status=503))
        telemetry.close()

    asyncio.run(flood())
    assert caplog.records[-1].getMessage().endswith(" have no line: 1 with 503")
