from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.cluster import control
from djl_trtllm.cluster.control import Place, delete, deploy, serve_here, status
from djl_trtllm.cluster.ingress import NODES
from djl_trtllm.errors import DjlTrtllmError
from tests.support.models import scripted_model
from tests.support.server import free_port

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
        monkeypatch.setattr("ray.init", self._noted("init"))
        monkeypatch.setattr("ray.shutdown", self._noted("ray.shutdown"))
        for name in ("start", "run", "delete", "shutdown"):
            monkeypatch.setattr(f"ray.serve.{name}", self._noted(name))
        monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications=self.applications))
        monkeypatch.setattr(control, "build", lambda arguments: arguments)

    def _noted(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)
            if name == "run" and self.error is not None:
                raise self.error

        return call


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> PlayedServe:
    return PlayedServe(monkeypatch)


def test_status_counts_the_replicas_of_all_deployments_by_state(serve: PlayedServe) -> None:
    (found,) = status("local")
    assert (found.name, found.state, found.message) == ("default", "RUNNING", "no room")
    assert found.replicas == {"RUNNING": 4, "STARTING": 2}
    assert serve.calls == ["init", "ray.shutdown"]


def test_an_application_that_is_not_there_is_not_deleted(serve: PlayedServe) -> None:
    with pytest.raises(DjlTrtllmError, match="no application other: it has default"):
        delete("other", "local")
    delete("default", "local")
    assert serve.calls.count("delete") == 1


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


def test_of_several_clusters_on_a_machine_auto_is_the_last_of_rays_folder(
    serve: PlayedServe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connected: list[str] = []
    monkeypatch.setattr("ray.init", lambda address, **_: connected.append(address))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    status("auto")
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        last = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{last}\n")
        status("auto")
    assert connected == ["auto", last]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_of_this_machine_ends_at_a_signal(
    serve: PlayedServe, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = signal.getsignal(number)
    model = scripted_model(tmp_path / "model")
    serve_here({"model": str(model)}, Place(), "127.0.0.1", 8000, lambda: os.kill(os.getpid(), number))
    assert serve.calls == ["init", "start", "run", "shutdown", "ray.shutdown"]
    assert signal.getsignal(number) is before
    assert {name: os.environ.get(name) for name in NODES} == NODES


def test_a_cluster_of_this_machine_ends_with_its_application(
    serve: PlayedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    serve_here({}, Place(), "127.0.0.1", 8000, serve.applications.clear)
    assert serve.calls[-2:] == ["shutdown", "ray.shutdown"]
