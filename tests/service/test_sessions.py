"""Stateful sessions: their ids, ends, folders and number."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, OverloadedError, SessionError
from djl_trtllm.service import sessions as module
from djl_trtllm.service.sessions import Sessions, open_sessions

START = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_session_has_an_id_an_end_and_a_folder(tmp_path: Path, clock: Clock) -> None:
    sessions = Sessions(tmp_path / "a" / "b", 60, 2, clock)
    session = sessions.create()
    assert str(uuid.UUID(session.id)) == session.id
    assert session.header == f"{session.id}; Expires=2023-11-14T22:14:20Z"
    assert session.path == tmp_path / "a" / "b" / session.id
    assert json.loads((session.path / ".expiration_ts").read_text()) == START + 60
    assert session.path.stat().st_mode & 0o777 == session.path.parent.stat().st_mode & 0o777 == 0o700
    assert sessions.find(session.id) is session
    assert sessions.create().id != session.id


def test_a_closed_session_is_gone_with_its_folder(tmp_path: Path, clock: Clock) -> None:
    sessions = Sessions(tmp_path, 60, 2, clock)
    session = sessions.create()
    (session.path / "history").write_text("x")
    sessions.close(session.id)
    assert list(tmp_path.iterdir()) == []
    for call in (sessions.find, sessions.close):
        with pytest.raises(SessionError, match=f"session not found: '{session.id}'"):
            call(session.id)


@pytest.mark.parametrize("identifier", ["", "..", "x" * 1000, "NEW_SESSION"])
def test_what_is_no_session_is_not_found(tmp_path: Path, identifier: str) -> None:
    with pytest.raises(SessionError, match="not found") as raised:
        Sessions(tmp_path, 60, 2).find(identifier)
    assert len(str(raised.value)) < 120


def test_a_session_ends_and_its_folder_goes_with_the_next_one(tmp_path: Path, clock: Clock) -> None:
    sessions = Sessions(tmp_path, 60, 1, clock)
    session = sessions.create()
    clock.now += 59.9
    assert sessions.find(session.id) is session
    clock.now += 0.1
    for call in (sessions.find, sessions.close):
        with pytest.raises(SessionError, match="has expired"):
            call(session.id)
    assert session.path.exists()
    assert [sessions.create().path] == list(tmp_path.iterdir())


def test_their_number_is_limited(tmp_path: Path, clock: Clock) -> None:
    sessions = Sessions(tmp_path, 60, 2, clock)
    first = sessions.create()
    clock.now += 10
    sessions.create()
    with pytest.raises(OverloadedError, match=r"2 sessions are open, the limit \(option.max_sessions\)") as raised:
        sessions.create()
    assert (raised.value.queue_depth, raised.value.capacity, raised.value.retry_after) == (2, 2, 50)
    sessions.close(first.id)
    sessions.create()


def test_sessions_continue_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    session = Sessions(tmp_path, 60, 2, clock).create()
    (tmp_path / "other").mkdir()
    (tmp_path / str(uuid.uuid4())).mkdir()
    broken = tmp_path / str(uuid.uuid4())
    broken.mkdir()
    (broken / ".expiration_ts").write_text('"soon"')
    shouted = tmp_path / str(uuid.uuid4()).upper()
    shouted.mkdir()
    (shouted / ".expiration_ts").write_text("1")
    again = Sessions(tmp_path, 60, 2, clock)
    found = again.find(session.id)
    assert (found.expires, found.path) == (session.expires, session.path)
    clock.now += 60
    again.create()
    assert not session.path.exists() and len(list(tmp_path.iterdir())) == 5


def test_sessions_are_as_the_options_say(tmp_path: Path) -> None:
    assert open_sessions(Options(sessions_path=tmp_path)) is None
    options = Options(
        enable_stateful_sessions=True, sessions_path=tmp_path / "here", sessions_expiration=7, max_sessions=1
    )
    sessions = open_sessions(options)
    assert sessions is not None and sessions.create().path.parent == tmp_path / "here"
    with pytest.raises(OverloadedError) as raised:
        sessions.create()
    assert raised.value.retry_after <= 7


@pytest.mark.parametrize("shared", [True, False])
def test_without_a_path_they_are_in_memory_or_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(module, "_MEMORY", tmp_path if shared else tmp_path / "missing")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    sessions = open_sessions(Options(enable_stateful_sessions=True))
    assert sessions is not None
    parent = tmp_path if shared else tmp_path / "temporary"
    assert sessions.create().path.parent == parent / "sagemaker_sessions"


def test_a_path_that_is_no_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"option.sessions_path=.*file.*expected a folder to write in"):
        open_sessions(Options(enable_stateful_sessions=True, sessions_path=tmp_path / "file"))


def test_a_path_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="not writable"):
        open_sessions(Options(enable_stateful_sessions=True, sessions_path=tmp_path))
