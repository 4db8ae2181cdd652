"""The process that runs Ray on this machine, over a Ray whose calls are noted."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.cluster import driver
from djl_trtllm.cluster.driver import Task
from djl_trtllm.errors import DjlTrtllmError
from tests.support.models import scripted_model
from tests.support.tables import by_rows, by_table

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)


class PlayedServe:
    """Ray, and its Serve with one application `default`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.given: dict[str, dict[str, Any]] = {}
        """The keywords of each call."""
        self.error: Exception | None = None
        self.deployment = SimpleNamespace(message="")
        deployments = {"djl-trtllm-router": SimpleNamespace(message=""), "djl-trtllm": self.deployment}
        default = SimpleNamespace(status=SimpleNamespace(value="RUNNING"), message="no room", deployments=deployments)
        self.applications: dict[str, Any] = {"default": default}
        monkeypatch.setattr("ray.init", self._noted("init", SimpleNamespace(address_info={"gcs_address": "here"})))
        monkeypatch.setattr("ray.shutdown", self._noted("ray.shutdown"))
        for name in ("start", "run", "delete", "shutdown"):
            monkeypatch.setattr(f"ray.serve.{name}", self._noted(name))
        monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications=self.applications))
        monkeypatch.setattr("djl_trtllm.cluster.driver.build", lambda arguments: arguments)

    def _noted(self, name: str, result: object = None) -> Any:
        def call(*_: Any, **given: Any) -> object:
            self.calls.append(name)
            self.given[name] = given
            if name == "run" and self.error is not None:
                raise self.error
            return result

        return call


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> PlayedServe:
    return PlayedServe(monkeypatch)


START = ["init", "start", "run"]
END = ["shutdown", "ray.shutdown"]


class Channel:
    """Both sides of the driver's channel."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.settimeout(60)

    def told(self) -> dict[str, Any]:
        """What the driver has said; empty if it has closed its side."""
        found: dict[str, Any] = json.loads(self.ours.makefile("rb").readline() or "{}")
        return found


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel()
    with made.ours, made.theirs:
        yield made


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(scripted_model(tmp_path / "model"))


def serve_by(channel: Channel, model: str, **arguments: Any) -> None:
    with contextlib.ExitStack() as ending:
        driver.serve(Task({"model": model, **arguments}), channel.theirs, ending)


@by_rows(("here", "replicas", "cpus"), [(3, 4, 6), (9, 4, 9), (None, 1, 2)])
def test_ray_and_serve_start_as_the_task_says_and_ray_counts_cpus_for_all_replicas(
    here: int | None,
    replicas: int,
    cpus: int,
    model: str,
    serve: PlayedServe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve.applications.clear()
    monkeypatch.setattr("os.cpu_count", lambda: here)
    task = Task({"model": model, "replicas": replicas, "cpus": 1.5}, "story", "/story", "127.0.0.2", 8123)
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack() as ending:
        driver.serve(task, theirs, ending)
    init, start, run = (serve.given[name] for name in START)
    assert (init["address"], init["num_cpus"], init["include_dashboard"]) == ("local", cpus, False)
    assert start["proxy_location"] == "HeadOnly"
    assert start["http_options"] == {"host": "127.0.0.2", "port": 8123}
    assert (run["name"], run["route_prefix"]) == ("story", "/story")


def test_the_application_is_removed_when_the_other_side_closes(
    channel: Channel, model: str, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.ours.shutdown(socket.SHUT_WR)
    monkeypatch.setattr("ray.serve.delete", lambda app, **_: serve.calls.append(serve.applications.pop(app) and app))
    serve_by(channel, model, options={"shutdown_timeout": 5})
    assert serve.calls == [*START, "default", *END]
    assert channel.told()["runs"] > 5, "what a replica gets to end"
    assert channel.told() == {}


@pytest.mark.parametrize("removed", ["DELETING", None])
def test_an_application_that_another_removes_ends_it(
    removed: str | None, channel: Channel, model: str, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    if removed is None:
        serve.applications.clear()
    else:
        serve.applications["default"].status.value = removed
        monkeypatch.setattr("time.sleep", lambda seconds: serve.applications.clear())
    serve_by(channel, model)
    assert serve.calls == [*START, *END]


@pytest.mark.parametrize("of_deployment", [True, False])
def test_the_last_line_is_the_replicas_own_reason(
    channel: Channel, model: str, serve: PlayedServe, of_deployment: bool
) -> None:
    traceback = 'File "application.py", line 1\ndjl_trtllm.errors.EngineError: no GPU is visible\n  - start with --gpus'
    placed = serve.deployment if of_deployment else serve.applications["default"]
    placed.message = f"failed to start 3 times. Error:\n{traceback}"
    serve.error = RuntimeError("Deploying failed")
    with pytest.raises(DjlTrtllmError) as error:
        serve_by(channel, model)
    assert str(error.value) == "default does not start: no GPU is visible\n  - start with --gpus"


def test_what_this_machine_lacks_is_said_before_ray_starts(channel: Channel, model: str, serve: PlayedServe) -> None:
    with pytest.raises(DjlTrtllmError, match="vLLM"):
        serve_by(channel, model, options={"backend": "vllm"})
    assert serve.calls == []


def test_an_engine_that_is_not_installed_is_said_before_ray_starts(
    channel: Channel, tiny_stories: Path, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djl_trtllm.backends.openvino.backend.find_spec", lambda name: None)
    with pytest.raises(DjlTrtllmError, match="OpenVINO GenAI is not installed"):
        serve_by(channel, str(tiny_stories))
    assert serve.calls == []


def test_wrong_options_are_said_before_ray_starts(channel: Channel, model: str, serve: PlayedServe) -> None:
    with pytest.raises(DjlTrtllmError, match="max_rolling_batch_size"):
        serve_by(channel, model, options={"max_rolling_batch_size": "many"})
    assert serve.calls == []


@by_table("call", "message", "ended", apart=True)
def test_what_does_not_start_is_said_and_ended(
    call: str,
    message: str,
    ended: list[str],
    channel: Channel,
    model: str,
    serve: PlayedServe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(call, failing)
    with pytest.raises(DjlTrtllmError, match=message):
        serve_by(channel, model)
    assert serve.calls == ended


def test_what_is_wrong_is_told_before_the_end(
    channel: Channel, model: str, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve.error = RuntimeError("no place")
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("ray.serve.shutdown", lambda: told.extend([channel.told(), channel.told()]))
    channel.ours.sendall(json.dumps({"arguments": {"model": model}}).encode() + b"\n")
    monkeypatch.setattr("sys.argv", ["driver", str(channel.theirs.detach())])
    driver.main()
    assert told == [{"error": "default does not start: no room"}, {}]
