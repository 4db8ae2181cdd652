from __future__ import annotations

import importlib
import socket
from contextlib import closing
from pathlib import Path

import pytest

from djl_trtllm.cluster.control import Place, as_current_cluster, delete, deploy, status
from djl_trtllm.errors import DjlTrtllmError
from tests.cluster.conftest import PlayedServe
from tests.support.server import free_port

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)


def test_status_counts_the_replicas_of_all_deployments_by_state(serve: PlayedServe) -> None:
    (found,) = status("local")
    assert (found.name, found.state, found.message) == ("default", "RUNNING", "no room")
    assert found.replicas == {"a RUNNING": 2, "a STARTING": 1, "b RUNNING": 2, "b STARTING": 1}
    assert serve.calls == ["init", "ray.shutdown"]


def test_an_application_that_is_not_there_is_not_deleted(serve: PlayedServe) -> None:
    with pytest.raises(DjlTrtllmError, match="no application other: it has default"):
        delete("other", "local")
    assert "delete" not in serve.calls


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


def test_a_cluster_that_does_not_delete_is_an_error(serve: PlayedServe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djl_trtllm.cluster.control._DELETE_SECONDS", 0.0)
    with pytest.raises(DjlTrtllmError, match="has not begun to remove default"):
        delete("default", "local")


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
