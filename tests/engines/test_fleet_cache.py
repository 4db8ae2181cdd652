"""An engine cache in S3: one machine compiles, whatever happens to it. Machines are folders here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from djl_trtllm.engines import fleet_cache
from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.engines.fleet_cache import FleetCache
from djl_trtllm.engines.lease import Lease
from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.errors import EngineError
from djl_trtllm.model.remote.s3 import S3Address
from tests.engines.cache_entries import KEY, Builder
from tests.support.s3_server import BUCKET, Fault, Request, Store

ADDRESS = S3Address.parse("s3://models/engines")
ENTRY, LEASE = f"engines/{KEY}.json", f"engines/{KEY}.lease"


class Clock:
    """Time that passes while this process sleeps and not otherwise; `meanwhile` is called then."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.meanwhile: Callable[[float], object] = lambda now: None

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.meanwhile(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fleet_cache, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    return clock


def provide(machine: Path, build: Callable[[Path], None], **settings: Any) -> list[str]:
    """Make the engine on a machine; the lines of progress."""
    machine.mkdir(exist_ok=True)
    lines: list[str] = []
    FleetCache(ADDRESS, **settings).provide(KEY, machine / KEY, build, lines.append)
    return lines


def whole(machine: Path) -> bool:
    manifest = Manifest.read(machine / KEY)
    return manifest is not None and not manifest.verify(machine / KEY)


def build_elsewhere(store: Store, machine: Path) -> None:
    """What another machine does that has the lease, but for giving that back."""
    lease = store.objects.pop(LEASE, None)
    provide(machine, Builder())
    if lease is not None:
        store.objects[LEASE] = lease


def test_the_first_machine_compiles_and_uploads(store: Store, tmp_path: Path) -> None:
    build = Builder()
    lines = provide(tmp_path / "a", build)
    assert whole(tmp_path / "a") and build.calls == 1
    assert not [line for line in lines if not line.startswith("uploading to s3://models/engines/")]
    (folder,) = {key.split("/")[2] for key in store.objects if key.startswith(f"engines/{KEY}/")}
    assert sorted(store.objects) == sorted(
        [ENTRY, f"engines/{KEY}/{folder}/manifest.json", f"engines/{KEY}/{folder}/model.bin"]
    )
    entry = msgspec.json.decode(store.objects[ENTRY].path.read_bytes())
    assert entry == {"folder": folder, "manifest": msgspec.to_builtins(Manifest.read(tmp_path / "a" / KEY))}


def test_the_second_machine_fetches_what_the_first_compiled(store: Store, tmp_path: Path) -> None:
    build = Builder()
    provide(tmp_path / "a", build)
    lines = provide(tmp_path / "b", build)
    assert whole(tmp_path / "b") and build.calls == 1
    assert lines[-1].startswith(f"downloaded the engine from s3://models/engines/{KEY}/")
    assert [path.name for path in (tmp_path / "b").iterdir()] == [KEY]
    assert sorted(path.name for path in (tmp_path / "b" / KEY).iterdir()) == ["manifest.json", "model.bin"]
    assert EngineCache(tmp_path / "b").lookup(KEY) is not None


def test_the_manifest_is_written_last_as_where_it_was_compiled(store: Store, tmp_path: Path) -> None:
    for machine in ("a", "b"):
        provide(tmp_path / machine, Builder())
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "b" / KEY).iterdir()}
    assert max(times, key=lambda name: times[name]) == "manifest.json"


# -- waiting for another machine -----------------------------------------------------------------------------------


def test_what_another_machine_compiles_meanwhile_is_fetched(store: Store, tmp_path: Path, clock: Clock) -> None:
    assert Lease(BUCKET, LEASE, 60.0).acquire()
    clock.meanwhile = lambda now: build_elsewhere(store, tmp_path / "other") if now == 1033 else None
    build = Builder()
    lines = provide(tmp_path / "a", build)
    assert whole(tmp_path / "a") and build.calls == 0
    assert lines[:3] == [
        f"another machine is compiling this engine for {ADDRESS}, waiting for it ({seconds} s)"
        for seconds in (0, 15, 30)
    ]
    assert lines[-1].startswith("downloaded the engine from")
    assert clock.slept == [3.0] * 11


def test_a_machine_that_died_is_succeeded(store: Store, tmp_path: Path, clock: Clock) -> None:
    assert Lease(BUCKET, LEASE, 8.0).acquire()

    def pass_time(now: float) -> None:
        store.seconds += clock.slept[-1]

    clock.meanwhile = pass_time
    build = Builder()
    provide(tmp_path / "a", build, lease_seconds=8.0)
    assert whole(tmp_path / "a") and build.calls == 1
    assert clock.slept == [2.0] * 5


def test_a_lease_lasts_a_minute_where_nothing_else_is_asked(store: Store, tmp_path: Path, clock: Clock) -> None:
    assert Lease(BUCKET, LEASE, 60.0).acquire()
    store.seconds += 60
    clock.meanwhile = lambda now: setattr(store, "seconds", store.seconds + 1)
    provide(tmp_path / "a", Builder())
    assert clock.slept == [3.0]


def test_a_wait_that_is_too_long_ends_in_compiling_here(store: Store, tmp_path: Path, clock: Clock) -> None:
    assert Lease(BUCKET, LEASE, 60.0).acquire()
    build = Builder()
    lines = provide(tmp_path / "a", build, wait_seconds=9.0)
    assert whole(tmp_path / "a") and build.calls == 1
    assert lines[1:] == [f"another machine has been compiling {KEY} for 12 s; compiling here as well"]
    assert sorted(store.objects) == [LEASE]


def test_an_engine_completed_between_the_look_and_the_lease_is_fetched(store: Store, tmp_path: Path) -> None:
    other = iter([lambda: build_elsewhere(store, tmp_path / "other")])

    def complete(request: Request) -> None:
        if (request.method, request.key) == ("PUT", LEASE) and (build_it := next(other, None)) is not None:
            store.lock.release()
            build_it()
            store.lock.acquire()

    store.fault = complete
    build = Builder()
    provide(tmp_path / "a", build)
    assert whole(tmp_path / "a") and build.calls == 0
    assert LEASE not in store.objects


# -- what is in the store is not what it should be -----------------------------------------------------------------


def damaged(store: Store, tmp_path: Path, name: str, content: bytes) -> list[str]:
    """Compile on one machine, change an object, and provide on two others; the lines of the first of these."""
    build = Builder()
    provide(tmp_path / "a", build)
    (key,) = (key for key in store.objects if key.endswith(name))
    store.put(key, content)
    lines = provide(tmp_path / "b", build)
    assert whole(tmp_path / "b") and build.calls == 2
    provide(tmp_path / "c", build)
    assert whole(tmp_path / "c") and build.calls == 2
    return lines


def test_a_damaged_engine_is_removed_and_compiled_again(store: Store, tmp_path: Path) -> None:
    lines = damaged(store, tmp_path, "model.bin", b"\1" * 10_000)
    (line,) = (line for line in lines if "is damaged" in line)
    assert line.startswith(f"the engine s3://models/engines/{KEY}/")
    assert line.endswith(
        "is damaged (model.bin: changed, same size and a different SHA-256); it is removed and compiled again"
    )


@pytest.mark.parametrize("content", [b"{", b"{}"])
def test_a_damaged_manifest_is_reported(store: Store, tmp_path: Path, content: bytes) -> None:
    lines = damaged(store, tmp_path, "manifest.json", content)
    assert any("is damaged (" in line and "manifest.json is broken" in line for line in lines)


def test_a_manifest_that_is_not_the_entrys_is_reported(store: Store, tmp_path: Path) -> None:
    entry = {"folder": "x", "manifest": {}}
    store.put(ENTRY, msgspec.json.encode(entry))
    store.put(f"engines/{KEY}/x/model.bin", b"")
    build = Builder()
    lines = provide(tmp_path / "a", build)
    assert any("is damaged (its manifest is missing or a different one)" in line for line in lines)
    assert whole(tmp_path / "a") and build.calls == 1


def test_an_entry_that_cannot_be_read_is_replaced(store: Store, tmp_path: Path) -> None:
    store.put(ENTRY, b"{")
    build = Builder()
    for machine in ("a", "b"):
        provide(tmp_path / machine, build)
        assert whole(tmp_path / machine)
    assert build.calls == 1


def test_files_without_their_entry_do_not_count(store: Store, tmp_path: Path) -> None:
    build = Builder()
    provide(tmp_path / "a", build)
    del store.objects[ENTRY]
    provide(tmp_path / "b", build)
    assert whole(tmp_path / "b") and build.calls == 2


def test_an_entry_that_another_machine_replaced_meanwhile_stays(store: Store, tmp_path: Path) -> None:
    provide(tmp_path / "other", Builder())
    entry = store.objects[ENTRY].path.read_bytes()
    store.put(ENTRY, b"{")

    def replaced(request: Request) -> None:
        if (request.method, request.key) == ("DELETE", ENTRY):
            store.put(ENTRY, entry)

    store.fault = replaced
    build = Builder()
    provide(tmp_path / "a", build)
    assert whole(tmp_path / "a") and build.calls == 0
    assert store.objects[ENTRY].path.read_bytes() == entry


# -- a store that fails --------------------------------------------------------------------------------------------


def refusing(method: str, part: str) -> Callable[[Request], int | None]:
    def fault(request: Request) -> int | None:
        if request.method == method and part in request.key:
            raise Fault(403, "AccessDenied")
        return None

    return fault


@pytest.mark.parametrize(("method", "part"), [("GET", ".json"), ("PUT", ".lease"), ("DELETE", ".json")])
def test_a_store_that_cannot_be_used_is_reported_and_does_not_stop_serving(
    store: Store, tmp_path: Path, method: str, part: str
) -> None:
    store.put(ENTRY, b"{")  # which wants removing
    store.fault = refusing(method, part)
    build = Builder()
    (line,) = provide(tmp_path / "a", build)
    assert line.startswith(f"the engine cache {ADDRESS} cannot be used: s3://models/engines/{KEY}.")
    assert line.endswith("; compiling here") and "access is denied" in line
    assert whole(tmp_path / "a") and build.calls == 1


def test_a_bucket_that_is_missing_is_reported(store: Store, tmp_path: Path) -> None:
    lines: list[str] = []
    FleetCache(S3Address.parse("s3://no-such-bucket/x")).provide(KEY, tmp_path / KEY, Builder(), lines.append)
    assert whole(tmp_path)
    assert "no such bucket" in lines[0]


@pytest.mark.parametrize("part", ["/model.bin", f"{KEY}.json"])
def test_an_engine_that_cannot_be_uploaded_serves_all_the_same(store: Store, tmp_path: Path, part: str) -> None:
    store.fault = refusing("PUT", part)
    build = Builder()
    lines = provide(tmp_path / "a", build)
    assert whole(tmp_path / "a") and build.calls == 1
    assert lines[-1].startswith("the engine was not uploaded: ") and "access is denied" in lines[-1]
    assert lines[-1].endswith("; other machines compile it themselves")
    assert LEASE not in store.objects


def test_the_engine_of_a_machine_that_was_first_is_as_good(store: Store, tmp_path: Path) -> None:
    def overtaken(request: Request) -> None:
        if (request.method, request.key) == ("PUT", ENTRY):
            store.put(ENTRY, b"another's")

    store.fault = overtaken
    lines = provide(tmp_path / "a", Builder())
    assert not any("not uploaded" in line for line in lines)
    assert store.objects[ENTRY].path.read_bytes() == b"another's"


def test_a_failed_compile_gives_the_lease_back(store: Store, tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        assert LEASE in store.objects
        raise EngineError("no")

    with pytest.raises(EngineError, match="no"):
        provide(tmp_path, fail)
    assert store.objects == {}
