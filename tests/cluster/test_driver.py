from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.cluster import driver
from djl_trtllm.errors import DjlTrtllmError
from tests.cluster.conftest import PlayedServe
from tests.support.models import scripted_model

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)

START = ["init", "start", "run"]
END = ["shutdown", "ray.shutdown"]


class Channel:
    """Both sides of the driver's channel."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.settimeout(10)

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


def served(channel: Channel, model: str, **arguments: Any) -> None:
    task = {"arguments": {"model": model, **arguments}, "app": "default", "route": "/", "host": "::1", "port": 8000}
    with contextlib.ExitStack() as ending:
        driver.serve(task, channel.theirs, ending)


def test_the_application_is_removed_when_the_other_side_closes(
    channel: Channel, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedServe(monkeypatch)
    channel.ours.shutdown(socket.SHUT_WR)
    monkeypatch.setattr("ray.serve.delete", lambda app, **_: played.calls.append(played.applications.pop(app) and app))
    served(channel, model, options={"shutdown_timeout": 5})
    assert played.calls == [*START, "default", *END]
    assert channel.told()["runs"] > 5, "what a replica gets to end"
    assert channel.told() == {}


@pytest.mark.parametrize("removed", ["DELETING", None])
def test_an_application_that_another_removes_ends_it(
    removed: str | None, channel: Channel, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedServe(monkeypatch)
    if removed is None:
        played.applications.clear()
    else:
        played.applications["default"].status.value = removed
        monkeypatch.setattr("time.sleep", lambda seconds: played.applications.clear())
    served(channel, model)
    assert played.calls == [*START, *END]


@pytest.mark.parametrize("later", [None, "another"])
def test_it_is_the_cluster_that_commands_find_until_another_one_is_started(
    later: str | None, current_cluster: Path, channel: Channel, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedServe(monkeypatch)
    found: list[str] = []

    def remove(seconds: float) -> None:
        found.append(current_cluster.read_text())
        played.applications.clear()
        if later is not None:
            current_cluster.write_text(later)

    played.applications["default"].status.value = "DELETING"
    monkeypatch.setattr("time.sleep", remove)
    served(channel, model)
    assert found == ["here"]
    assert (current_cluster.read_text() if current_cluster.exists() else None) == later


def test_wrong_options_are_said_before_ray_starts(
    channel: Channel, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedServe(monkeypatch)
    with pytest.raises(DjlTrtllmError, match="max_rolling_batch_size"):
        served(channel, model, options={"max_rolling_batch_size": "many"})
    assert played.calls == []


@pytest.mark.parametrize(
    ("call", "message", "ended"),
    [
        ("ray.init", "Ray does not start on this machine: no room", []),
        ("ray.serve.start", "Ray Serve does not start on this machine: no room", ["init", *END]),
        ("ray.serve.run", "default does not start: no room", ["init", "start", *END]),
    ],
)
def test_what_does_not_start_is_said_and_ended(
    call: str, message: str, ended: list[str], channel: Channel, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedServe(monkeypatch)

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(call, failing)
    with pytest.raises(DjlTrtllmError, match=message):
        served(channel, model)
    assert played.calls == ended


def test_what_is_wrong_is_told_before_the_end(channel: Channel, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedServe(monkeypatch)
    played.error = RuntimeError("no place")
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("ray.serve.shutdown", lambda: told.extend([channel.told(), channel.told()]))
    task = {"arguments": {"model": model}, "app": "default", "route": "/", "host": "::1", "port": 8000}
    channel.ours.sendall(json.dumps(task).encode() + b"\n")
    monkeypatch.setattr("sys.argv", ["driver", str(channel.theirs.detach())])
    driver.main()
    assert told == [{"error": "default does not start: no room"}, {}]
