"""The applications of a Ray cluster, and the process that runs Ray on this machine."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.cluster import control
from djl_trtllm.cluster.control import Place, as_current_cluster, delete, deploy, status
from djl_trtllm.errors import DjlTrtllmError
from tests.support.models import scripted_model
from tests.support.server import free_port
from tests.support.tables import by_table

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)


class PlayedServe:
    """Ray, and its Serve with one application `default`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None
        deployment = SimpleNamespace(replica_states={"RUNNING": 2, "STARTING": 1})
        default = SimpleNamespace(
            status=SimpleNamespace(value="RUNNING"), message="no room", deployments={"a": deployment, "b": deployment}
        )
        self.applications: dict[str, Any] = {"default": default}
        monkeypatch.setattr("ray.init", self._noted("init", SimpleNamespace(address_info={"gcs_address": "here"})))
        monkeypatch.setattr("ray.shutdown", self._noted("ray.shutdown"))
        for name in ("start", "run", "delete", "shutdown"):
            monkeypatch.setattr(f"ray.serve.{name}", self._noted(name))
        monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications=self.applications))
        monkeypatch.setattr("djl_trtllm.cluster.control.build", lambda arguments: arguments)

    def _noted(self, name: str, result: object = None) -> Any:
        def call(*_: Any, **__: Any) -> object:
            self.calls.append(name)
            if name == "run" and self.error is not None:
                raise self.error
            return result

        return call


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> PlayedServe:
    return PlayedServe(monkeypatch)


def test_status_counts_the_replicas_of_all_deployments_by_state(serve: PlayedServe) -> None:
    (found,) = status("local")
    assert (found.name, found.state, found.message) == ("default", "RUNNING", "no room")
    assert found.replicas == {"a RUNNING": 2, "a STARTING": 1, "b RUNNING": 2, "b STARTING": 1}
    assert serve.calls == ["init", "ray.shutdown"]


def test_an_application_that_is_not_there_or_stays_is_told(serve: PlayedServe, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DjlTrtllmError, match="no application other: it has default"):
        delete("other", "local")
    assert "delete" not in serve.calls
    monkeypatch.setattr("djl_trtllm.cluster.control._DELETE_SECONDS", 0.0)
    with pytest.raises(DjlTrtllmError, match="has not begun to remove default"):
        delete("default", "local")


@pytest.mark.parametrize("state", ["DELETING", None])
def test_a_process_that_deletes_is_connected_until_the_cluster_does(
    state: str | None, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(seconds: float) -> None:
        serve.calls.append("later")
        if serve.calls.count("later") == 3:
            if state is None:
                serve.applications.clear()
            else:
                serve.applications["default"].status.value = state

    monkeypatch.setattr("time.sleep", later)
    delete("default", "local")
    assert serve.calls == ["init", "delete", *["later"] * 3, "ray.shutdown"]


def test_a_model_that_does_not_start_is_an_error_with_serves_message(serve: PlayedServe) -> None:
    serve.error = RuntimeError("Deploying failed")
    with pytest.raises(DjlTrtllmError, match="default does not start: no room"):
        deploy({}, Place(), "local")
    with pytest.raises(DjlTrtllmError, match="other does not start: Deploying failed"):
        deploy({}, Place("other"), "local")


def test_an_address_at_which_nobody_listens_is_an_error_at_once(serve: PlayedServe) -> None:
    with pytest.raises(DjlTrtllmError, match=r"no Ray cluster at ray://127.0.0.1:\d+ .*djl-trtllm cluster up MODEL"):
        status(f"ray://127.0.0.1:{free_port()}")
    assert serve.calls == []


def test_the_address_of_a_cluster_that_has_ended_is_an_error_at_once(
    serve: PlayedServe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(DjlTrtllmError, match="no Ray cluster at auto"):
        status("auto")


def test_ray_itself_finds_the_current_cluster_of_its_folder(
    serve: PlayedServe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connected: list[str] = []
    services = importlib.import_module("ray._private.services")
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"another:1", "other:2"})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", lambda address, **_: connected.append(address))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        last = f"127.0.0.1:{listener.getsockname()[1]}"
        with as_current_cluster(last):
            found = services.get_ray_address_from_environment("auto", str(tmp_path / "ray"))
            status("auto")
    assert connected == ["auto"]
    assert found == last, "what Ray makes of it where several clusters run"


# -- The driver of a cluster of this machine.


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


@pytest.fixture(autouse=True)
def current_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what `auto` is."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(scripted_model(tmp_path / "model"))


def serve_by(channel: Channel, model: str, **arguments: Any) -> None:
    task = {"arguments": {"model": model, **arguments}, "app": "default", "route": "/", "host": "::1", "port": 8000}
    with contextlib.ExitStack() as ending:
        control.serve(task, channel.theirs, ending)


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


@pytest.mark.parametrize("later", [None, "another"])
def test_it_is_the_cluster_that_commands_find_until_another_one_is_started(
    later: str | None,
    current_cluster: Path,
    channel: Channel,
    model: str,
    serve: PlayedServe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []

    def remove(seconds: float) -> None:
        found.append(current_cluster.read_text())
        serve.applications.clear()
        if later is not None:
            current_cluster.write_text(later)

    serve.applications["default"].status.value = "DELETING"
    monkeypatch.setattr("time.sleep", remove)
    serve_by(channel, model)
    assert found == ["here"]
    assert (current_cluster.read_text() if current_cluster.exists() else None) == later


def test_the_last_line_is_the_replicas_own_reason(serve: PlayedServe) -> None:
    traceback = 'File "application.py", line 1\ndjl_trtllm.errors.EngineError: no GPU is visible\n  - start with --gpus'
    serve.applications["default"].message = f"failed to start 3 times. Error:\n{traceback}"
    serve.error = RuntimeError("Deploying failed")
    with pytest.raises(DjlTrtllmError) as error:
        deploy({}, Place(), "local")
    assert str(error.value) == "default does not start: no GPU is visible\n  - start with --gpus"


def test_what_this_machine_lacks_is_said_before_ray_starts(channel: Channel, model: str, serve: PlayedServe) -> None:
    with pytest.raises(DjlTrtllmError, match="vLLM"):
        serve_by(channel, model, options={"backend": "vllm"})
    assert serve.calls == []


def test_wrong_options_are_said_before_ray_starts(channel: Channel, model: str, serve: PlayedServe) -> None:
    with pytest.raises(DjlTrtllmError, match="max_rolling_batch_size"):
        serve_by(channel, model, options={"max_rolling_batch_size": "many"})
    assert serve.calls == []


@by_table("call", "message", "ended")
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
    task = {"arguments": {"model": model}, "app": "default", "route": "/", "host": "::1", "port": 8000}
    channel.ours.sendall(json.dumps(task).encode() + b"\n")
    monkeypatch.setattr("sys.argv", ["driver", str(channel.theirs.detach())])
    control.main()
    assert told == [{"error": "default does not start: no room"}, {}]
