"""Whose a request is."""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, InvalidRequestError, OverloadedError, SessionError, TooManyRequestsError
from djl_trtllm.request import RequestOrigin
from djl_trtllm.service import clients as module
from djl_trtllm.service.clients import Clients, Places, Sessions, open_sessions
from tests.support.tables import by_rows, by_table
from tests.support.virtual_time import Clock


def clients(**options: Any) -> Clients:
    return Clients(Options(**options))


@by_rows(
    ("options", "key", "header", "address", "client"),
    [
        ({"client_header": "X-User-Id"}, "web", " ann ", "10.0.0.7", "key web"),
        ({"client_header": "X-User-Id"}, None, " ann ", "10.0.0.7", "header ann"),
        ({"client_header": "X-User-Id"}, None, " ", "10.0.0.7", "address 10.0.0.7"),
        ({}, None, "ann", "10.0.0.7", "address 10.0.0.7"),
        ({}, None, "", "x" * 1000, f"address {'x' * 128}"),
        ({}, None, "", None, ""),
        # Nobody's key is treated as an address.
        ({"client_header": "x-user-id"}, "10.0.0.7", "", None, "key 10.0.0.7"),
        ({"client_header": "x-user-id"}, None, "10.0.0.7", None, "header 10.0.0.7"),
    ],
)
def test_an_api_key_is_before_a_header_and_that_before_an_address(
    options: dict[str, str], key: str | None, header: str, address: str | None, client: str
) -> None:
    headers = {"x-user-id": header, "": "nobody"}
    caller = clients(**options).caller(key, headers, address)
    assert (caller.client, caller.share) == (client, client)
    caller = clients(**options, scheduling_policy="fcfs").caller(key, headers, address)
    assert (caller.client, caller.share) == (client, "")  # one share for all


@pytest.mark.parametrize(
    ("key", "headers", "address", "label"),
    [
        ("web", {}, "10.0.0.7", "web"),
        (None, {"x-user-id": "ann@example.com"}, "10.0.0.7", "header:71d4f55f72fa"),
        (None, {}, "10.0.0.7", "address:" + hashlib.sha256(b"10.0.0.7").hexdigest()[:12]),
        (None, {}, None, ""),
    ],
)
def test_a_label_has_the_name_of_a_key_and_of_others_a_hash(
    key: str | None, headers: dict[str, str], address: str | None, label: str
) -> None:
    some = clients(client_header="x-user-id")
    caller = some.caller(key, headers, address)
    assert caller.label == caller.origin("r-1", "lmi").client_label == label
    assert module.label(some.client(key, headers, address)) == label


@by_rows(("keys_file", "key", "salt"), [("keys.yaml", "web", "key web"), ("keys.yaml", None, ""), (None, "web", "")])
def test_a_request_has_its_clients_share_priority_and_label_and_of_several_keys_its_own_prompts(
    keys_file: str | None, key: str | None, salt: str
) -> None:
    some = clients(client_header="x-user-id", priority_header="x-priority", api_keys_file=keys_file and Path(keys_file))
    caller = some.caller(key, {"x-user-id": "ann", "x-priority": "high"}, None)
    share, label = ("header ann", module.label("header ann")) if key is None else ("key web", "web")
    assert caller.origin("r-1", "lmi") == RequestOrigin("r-1", "lmi", share, 1, label, salt)


def test_a_long_name_takes_no_more_memory_than_a_short_one() -> None:
    some = clients(client_header="x-user-id")
    names = {some.caller(None, {"x-user-id": letter * 10_000}, None).client for letter in "ab\udcff"}
    assert len(names) == 3
    assert max(map(len, names)) < 100
    assert len(some.caller(None, {"x-user-id": "a" * 128}, None).client) == len("header ") + 128


@by_rows(("given", "priority"), [("high", 1), ("normal", 0), ("low", -1), (" HIGH ", 1), ("", 0), (None, 0)])
def test_the_priority_is_what_the_operators_header_says(given: str | None, priority: int) -> None:
    headers = {} if given is None else {"x-priority": given}
    assert clients(priority_header="X-Priority").caller(None, headers, None).priority == priority
    assert clients().caller(None, headers, None).priority == 0
    with pytest.raises(InvalidRequestError, match="the header x-priority is 'urgent': expected high, normal, low"):
        clients(priority_header="x-priority").caller(None, {"x-priority": "urgent"}, None)


def test_a_client_has_so_many_requests_at_once_and_others_theirs() -> None:
    some = clients(max_requests_per_client=2)
    one, other = some.caller("a", {}, None), some.caller("b", {}, None)
    one.enter()
    one.enter()
    with pytest.raises(TooManyRequestsError, match="2 requests at once, and max_requests_per_client is 2") as error:
        one.enter()
    assert (error.value.queue_depth, error.value.capacity, error.value.retry_after) == (2, 2, 1)
    other.enter()
    one.leave()
    one.enter()
    with pytest.raises(TooManyRequestsError):
        one.enter()
    for caller in (one, one, other):
        caller.leave()
    one.enter()
    free = clients().caller("a", {}, None)
    for _ in range(1000):
        free.enter()
    free.leave()


@pytest.mark.parametrize(
    ("given", "expected"),
    [(("10.0.0.0/8", "::1"), ["10.0.0.0/8", "::1"]), (("*",), "*"), (("::1", "*"), "*"), ((), [])],
)
def test_proxies_are_addresses_networks_or_any(given: tuple[str, ...], expected: object) -> None:
    assert clients(forwarded_allow_ips=given).proxies == expected
    with pytest.raises(ConfigError, match="forwarded_allow_ips has 'proxy'"):
        clients(forwarded_allow_ips=("proxy",))


@by_table("limit", "clients", "taken")
def test_a_client_has_as_many_places_as_are_free_after_it(limit: int, clients: str, taken: str) -> None:
    places = Places(limit)
    assert "".join("1" if places.take(client) else "." for client in clients) == taken
    assert places.used == taken.count("1")
    for client in [client for client, each in zip(clients, taken, strict=True) if each == "1"]:
        places.leave(client)
    assert places.used == 0 and places.take("a")


# -- sessions ----------------------------------------------------------------------------------------------------------

START = 1_700_000_000.0


@pytest.fixture
def clock() -> Clock:
    return Clock(START)


def test_a_session_has_an_id_an_end_and_a_folder(tmp_path: Path, clock: Clock) -> None:
    sessions = Sessions(tmp_path / "a" / "b", 60, 2, clock)
    session = sessions.create()
    assert str(uuid.UUID(session.id)) == session.id
    assert session.header == f"{session.id}; Expires=2023-11-14T22:14:20Z"
    assert session.path == tmp_path / "a" / "b" / session.id
    assert json.loads((session.path / ".expiration_ts").read_text()) == START + 60
    assert session.path.stat().st_mode & 0o777 == session.path.parent.stat().st_mode & 0o777 == 0o700
    assert sessions.find(session.id) is session
    assert sessions.create("other").id != session.id


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
    first = sessions.create("a")
    clock.now += 10
    sessions.create("b")
    with pytest.raises(OverloadedError, match=r"sessions \(option.max_sessions\): 2 of 2 are open") as raised:
        sessions.create("c")
    assert (raised.value.queue_depth, raised.value.capacity, raised.value.retry_after) == (2, 2, 50)
    sessions.close(first.id)
    sessions.create("c")


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


def test_a_path_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("os.access", lambda *_: False)
    for path, told in ((tmp_path, "not writable"), (tmp_path / "file", "expected a folder")):
        with pytest.raises(ConfigError, match=f"option.sessions_path={path}: .*{told}"):
            open_sessions(Options(enable_stateful_sessions=True, sessions_path=path))
