from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from djl_trtllm.cluster import machine
from djl_trtllm.cluster.control import Place
from djl_trtllm.cluster.machine import serve_here
from djl_trtllm.errors import DjlTrtllmError

_BEGIN = """
import json, os, signal, socket, subprocess, sys, time
channel = socket.socket(fileno=int(sys.argv[1]))
lines = channel.makefile("rb")
task = json.loads(lines.readline())
def tell(**what):
    channel.sendall(json.dumps(what).encode() + b"\\n")
def interrupt():
    os.kill(os.getppid(), signal.SIGTERM)
def hang():
    time.sleep(1000)
"""
RUNS = "tell(runs=1000)"
ENDS = "lines.read()"
"""Until the other side has closed."""


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, machine.logger.name)
    return caplog


@pytest.fixture(autouse=True)
def nothing_is_left() -> object:
    before = set(psutil.Process().children(recursive=True))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def served(monkeypatch: pytest.MonkeyPatch, *steps: str, signal_when_ready: int | None = None) -> int:
    """Serve with a driver that does these steps; how often the model was ready."""
    calls: list[None] = []

    def ready() -> None:
        calls.append(None)
        if signal_when_ready is not None:
            os.kill(os.getpid(), signal_when_ready)

    monkeypatch.setattr(machine, "_DRIVER", (sys.executable, "-c", _BEGIN + "\n".join(steps)))
    arguments = {"model": "DIR", "replicas": 2}
    serve_here(arguments, Place("story", "/story"), "127.0.0.1", 8000, ready)
    return len(calls)


def test_a_driver_is_told_what_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DjlTrtllmError) as caught:
        served(monkeypatch, "tell(error=json.dumps(task, sort_keys=True))")
    assert str(caught.value) == (
        '{"app": "story", "arguments": {"model": "DIR", "replicas": 2}, "host": "127.0.0.1", "port": 8000, '
        '"route": "/story"}'
    )


def test_it_ends_with_its_application(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    assert served(monkeypatch, RUNS) == 1
    assert not log.records


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_at_a_signal_the_driver_ends_what_runs(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    end = f"open({str(done)!r}, 'w').close()"
    assert served(monkeypatch, RUNS, ENDS, end, signal_when_ready=number) == 1
    assert done.exists()
    assert not log.records


def test_a_signal_before_the_model_runs_kills_at_once(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    assert served(monkeypatch, "interrupt()", "hang()") == 0
    assert "had not ended and were killed: python" in log.text


def test_another_signal_kills_at_once(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    assert served(monkeypatch, RUNS, ENDS, "interrupt()", "hang()", signal_when_ready=signal.SIGINT) == 1
    assert "had not ended and were killed: python" in log.text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to whom they come from")
def test_what_does_not_end_in_time_is_killed_and_named_also_what_has_left_its_parent(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "_SERVE_AND_RAY_SECONDS", 0.1)
    monkeypatch.setattr(machine, "_END_SECONDS", 5.0)
    leave = "subprocess.run(['sh', '-c', 'setsid sleep 1000 &'])"
    assert served(monkeypatch, leave, "tell(runs=0)", "channel.shutdown(socket.SHUT_WR)", "hang()") == 1
    (record,) = log.records
    assert "python" in record.getMessage()
    assert "sleep (" in record.getMessage()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills processes with their parent")
def test_what_is_killed_with_its_parent_is_named_too(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    kill = psutil.Process.kill

    def kill_and_wait(process: psutil.Process) -> None:
        kill(process)
        time.sleep(0.1)  # the kernel may be faster than we are

    monkeypatch.setattr(psutil.Process, "kill", kill_and_wait)
    monkeypatch.setattr(machine, "_END_SECONDS", 5.0)
    die_with_parent = "import ctypes; die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)"
    start = "for _ in range(8): subprocess.Popen(['sleep', '1000'], preexec_fn=die_with_parent)"
    assert served(monkeypatch, die_with_parent, start, RUNS, ENDS, "interrupt()", "hang()", signal_when_ready=15) == 1
    assert log.text.count("sleep (") == 8


def test_an_error_is_raised_whatever_the_driver_does_then(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "_SERVE_AND_RAY_SECONDS", 0.1)
    monkeypatch.setattr(machine, "_END_SECONDS", 5.0)
    with pytest.raises(DjlTrtllmError, match="no room"):
        served(monkeypatch, "tell(error='no room')", "channel.shutdown(socket.SHUT_WR)", "hang()")
    assert "python" in log.text


def test_a_driver_that_ends_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DjlTrtllmError, match="the process that runs Ray has ended with status 3"):
        served(monkeypatch, RUNS, "sys.exit(3)")


def test_the_driver_has_the_environment_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DjlTrtllmError) as caught:
        served(monkeypatch, "tell(error=os.environ['RAY_SERVE_HAPROXY_SOCKET_PATH'])")
    folder = Path(str(caught.value)).parent
    assert folder.name.startswith("djl-trtllm-")
    assert not folder.exists(), "it ends with the cluster"
