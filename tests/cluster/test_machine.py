from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from djl_trtllm.cluster import machine
from djl_trtllm.cluster.driver import Task
from djl_trtllm.cluster.machine import environment_of_machine, serve_here
from djl_trtllm.cluster.ray_names import NODES
from djl_trtllm.errors import DjlTrtllmError
from tests.support.processes import PATIENCE
from tests.support.tables import by_table

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


Serve = Callable[..., int]


@pytest.fixture
def served() -> Serve:
    """`served(step, ..., at_ready=SIGNAL)`: serve with a driver that does this; how often the model was ready.

    With `hangs` the driver is not waited for.
    """

    def serve(*steps: str, at_ready: int | None = None, hangs: bool = False) -> int:
        calls: list[None] = []

        def ready() -> None:
            calls.append(None)
            if at_ready is not None:
                os.kill(os.getpid(), at_ready)

        driver = (sys.executable, "-c", _BEGIN + "\n".join(steps))
        task = Task({"model": "DIR", "replicas": 2}, "story", "/story", "127.0.0.1", 8000)
        seconds = (0.1, 2.0) if hangs else (PATIENCE, PATIENCE)
        serve_here(task, ready, driver=driver, ray_seconds=seconds[0], end_seconds=seconds[1])
        return len(calls)

    return serve


def test_a_driver_is_told_what_to_serve(served: Serve) -> None:
    with pytest.raises(DjlTrtllmError) as caught:
        served("tell(error=json.dumps(task, sort_keys=True))")
    assert str(caught.value) == (
        '{"app": "story", "arguments": {"model": "DIR", "replicas": 2}, "host": "127.0.0.1", "port": 8000, '
        '"route": "/story"}'
    )


def test_it_ends_with_its_application(served: Serve, log: pytest.LogCaptureFixture) -> None:
    assert served(RUNS) == 1
    assert not log.records


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_at_a_signal_the_driver_ends_what_runs(
    number: signal.Signals, served: Serve, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    end = f"open({str(done)!r}, 'w').close()"
    assert served(RUNS, ENDS, end, at_ready=number) == 1
    assert done.exists()
    assert not log.records


def test_a_signal_before_the_model_runs_kills_at_once(served: Serve, log: pytest.LogCaptureFixture) -> None:
    assert served("interrupt()", "hang()") == 0
    assert "had not ended and were killed: python" in log.text


def test_another_signal_kills_at_once(served: Serve, log: pytest.LogCaptureFixture) -> None:
    assert served(RUNS, ENDS, "interrupt()", "hang()", at_ready=signal.SIGINT) == 1
    assert "had not ended and were killed: python" in log.text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to whom they come from")
def test_what_does_not_end_in_time_is_killed_and_named_also_what_has_left_its_parent(
    served: Serve, log: pytest.LogCaptureFixture
) -> None:
    leave = "subprocess.run(['sh', '-c', 'setsid sleep 1000 &'])"
    assert served(leave, "tell(runs=0)", "channel.shutdown(socket.SHUT_WR)", "hang()", hangs=True) == 1
    (record,) = log.records
    assert "python" in record.getMessage()
    assert "sleep (" in record.getMessage()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills processes with their parent")
def test_what_is_killed_with_its_parent_is_named_too(
    served: Serve, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    kill = psutil.Process.kill

    def kill_and_wait(process: psutil.Process) -> None:
        kill(process)
        time.sleep(0.1)  # the kernel may be faster than we are

    monkeypatch.setattr(psutil.Process, "kill", kill_and_wait)
    die_with_parent = "import ctypes; die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)"
    start = "for _ in range(8): subprocess.Popen(['sleep', '1000'], preexec_fn=die_with_parent)"
    assert served(die_with_parent, start, RUNS, ENDS, "interrupt()", "hang()", at_ready=15) == 1
    assert log.text.count("sleep (") == 8


def test_an_error_is_raised_whatever_the_driver_does_then(served: Serve, log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DjlTrtllmError, match="no room"):
        served("tell(error='no room')", "channel.shutdown(socket.SHUT_WR)", "hang()", hangs=True)
    assert "python" in log.text


def test_a_driver_that_ends_by_itself_is_an_error(served: Serve) -> None:
    with pytest.raises(DjlTrtllmError, match="the process that runs Ray has ended with status 3"):
        served(RUNS, "sys.exit(3)")


def test_the_driver_has_the_environment_of_the_machine(served: Serve) -> None:
    with pytest.raises(DjlTrtllmError) as caught:
        served("tell(error=os.environ['RAY_SERVE_HAPROXY_SOCKET_PATH'])")
    folder = Path(str(caught.value)).parent
    assert folder.name.startswith("djl-")
    assert not folder.exists(), "it ends with the cluster"


def test_paths_of_sockets_are_short_also_where_the_folder_for_temporary_files_has_a_long_name(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a folder with a long name").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a folder with a long name"))
    with pytest.raises(DjlTrtllmError) as caught:
        served("tell(error=os.environ['RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH'])")
    assert len(str(caught.value)) + 57 <= 97, "Ray adds a folder"


@pytest.fixture(autouse=True)
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "version", lambda name: "2.60.0")


def path_with(folder: Path, *programs: str) -> dict[str, str]:
    for program in programs:
        (folder / program).touch(0o755)
    return {"PATH": str(folder)}


def test_what_is_set_stays_and_the_rest_is_that_of_nodes(tmp_path: Path) -> None:
    given = {**path_with(tmp_path, "haproxy"), "RAY_SERVE_HAPROXY_MAXCONN": "7", "RAY_SERVE_HAPROXY_STATS_PORT": "1"}
    found = environment_of_machine(given, tmp_path)
    assert found.items() >= {**NODES, **given, "RAY_USAGE_STATS_ENABLED": "0"}.items()


@by_table("ray", "programs", "used")
def test_haproxy_is_used_where_the_programs_are_that_this_ray_needs(
    ray: str, programs: tuple[str, ...], used: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "version", lambda name: ray)
    found = environment_of_machine(path_with(tmp_path, *programs), tmp_path)
    assert (found.get("RAY_SERVE_ENABLE_HA_PROXY") == "1") is used


def test_haproxy_of_a_package_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    path_with(tmp_path / "bin", "haproxy")
    monkeypatch.setattr(machine, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    found = environment_of_machine({"PATH": "/nowhere"}, tmp_path)
    assert found["PATH"] == f"/nowhere:{tmp_path}/bin"
    assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_clusters_beside_each_other_have_files_and_ports_of_their_own(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    one = environment_of_machine({}, first)
    ports = ("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT")
    with socket.create_server(("", int(one[ports[0]]))), socket.create_server(("", int(one[ports[1]]) + 1)):
        other = environment_of_machine({}, second)
    assert one[ports[0]] != other[ports[0]]
    assert int(other[ports[1]]) > int(one["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"])
    assert [value for value in one.values() if str(first) in value]
    assert not [value for value in other.values() if str(first) in value]
