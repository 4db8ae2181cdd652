"""An engine cache in S3: one machine compiles, whatever happens to it. Machines are folders here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from djl_trtllm.engines import fleet_cache
from djl_trtllm.engines.cache import EngineCache, Manifest
from djl_trtllm.engines.fleet_cache import FleetCache, Lease
from djl_trtllm.errors import BuildError, DownloadError, EngineError
from djl_trtllm.model.remote import s3
from djl_trtllm.model.remote.s3 import S3Address
from tests.engines.helpers import KEY, Builder, started
from tests.support.processes import wait_until
from tests.support.s3 import BUCKET, Fault, Request, Store, fast_retries, keys, moto_server, variables

QUICK = 0.04
"""Seconds of a lease that is renewed at once; by the store's clock, which stands still, it does not expire."""


def lease(seconds: float = 60.0) -> Lease:
    return Lease(S3Address(BUCKET, "lease"), seconds)


def failing(methods: str, part: str = "", status: int = 403, code: str = "AccessDenied") -> Callable[[Request], None]:
    """A store that answers requests for keys with this part by an error."""

    def fault(request: Request) -> None:
        if request.method in methods.split() and part in request.key:
            raise Fault(status, code)

    return fault


ALL = "GET HEAD PUT DELETE"


def test_of_all_machines_one_has_it_until_it_expires_by_the_stores_clock(store: Store) -> None:
    first, second = lease(), lease()
    assert not first.is_held() and first.acquire()
    content = store.objects["lease"].path.read_bytes()
    assert not second.acquire()
    store.seconds += 60
    assert not second.acquire() and second.is_held()
    store.seconds += 1
    assert not second.is_held() and second.acquire()
    assert not first.acquire()
    assert store.objects["lease"].path.read_bytes() != content  # it says whose it is
    with pytest.raises(DownloadError, match="no such bucket"):
        Lease(S3Address("no-such-bucket", "lease"), 60.0).acquire()


def overtaking(store: Store, method: str, count: int) -> Callable[[Request], None]:
    """Another machine takes the lease before the request of this number."""

    def fault(request: Request) -> None:
        if (request.method, request.count) == (method, count):
            store.put("lease", b"another's")

    return fault


def test_of_two_that_find_it_expired_or_given_back_one_gets_it(store: Store) -> None:
    assert lease().acquire()
    store.seconds += 61
    store.fault = overtaking(store, "PUT", 2)
    assert not lease().acquire()
    store.fault = failing("GET", status=404, code="NoSuchKey")  # given back, and taken by another
    assert not lease().acquire()

    def given_back(request: Request) -> None:
        if request.method == "GET":
            store.objects.clear()
            raise Fault(404, "NoSuchKey")

    store.fault = given_back
    assert lease().acquire()


@pytest.mark.parametrize("methods", [ALL, "GET"])
def test_a_store_that_cannot_be_used_is_reported(store: Store, methods: str) -> None:
    assert lease().acquire()
    store.fault = failing(methods)
    with pytest.raises(DownloadError, match="s3://models/lease: access is denied"):
        lease().acquire()


@pytest.mark.parametrize("status", [409, 412])
def test_one_that_another_machine_is_just_taking_is_not_had(store: Store, status: int) -> None:
    store.fault = failing("PUT", status=status, code="ConditionalRequestConflict")
    store.put("lease", b"another's")
    assert not lease().acquire()


def test_renewing_has_ended_before_it_is_given_back_whatever_happens(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Watched(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            order.append(f"{self.name} joined")
            super().join(timeout)

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            order.append(f"waits {timeout} s")
            return super().wait(timeout)

    first = lease(60.0)
    assert first.acquire()
    store.fault = lambda request: order.append(request.method)
    monkeypatch.setattr(threading, "Thread", Watched)
    monkeypatch.setattr(threading, "Event", Waited)
    with pytest.raises(RuntimeError), first.held():
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "lease")
        assert thread.daemon  # the end of the process does not wait for it
        raise RuntimeError
    assert [what for what in order if "None" not in what] == ["waits 15.0 s", "lease joined", "DELETE"]
    assert store.objects == {}


def test_it_is_renewed_while_it_is_held_and_given_back(store: Store) -> None:
    first = lease(QUICK)
    assert first.acquire()
    with first.held():
        for _ in range(2):
            store.seconds += 100
            wait_until(lambda: store.objects["lease"].modified == store.seconds)
            assert not lease(QUICK).acquire()
    assert store.objects == {}


def test_one_that_was_taken_over_is_neither_renewed_nor_given_back(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first = lease(QUICK)
    assert first.acquire()
    with first.held():
        store.put("lease", b"another's")
        wait_until(lambda: "another machine took over the lease s3://models/lease" in caplog.text)
    assert store.objects["lease"].path.read_bytes() == b"another's"


def test_a_store_that_fails_for_a_while_does_not_end_it(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    first = lease(QUICK)
    assert first.acquire()
    with first.held():
        store.fault = failing(ALL)
        wait_until(lambda: "cannot renew the lease: s3://models/lease: access is denied" in caplog.text)
        store.fault = None
        store.seconds += 100
        wait_until(lambda: store.objects["lease"].modified == store.seconds)
        store.fault = failing("DELETE")
    assert "the lease was not released: s3://models/lease: access is denied" in caplog.text


@pytest.mark.usefixtures("clock")
def test_a_store_that_is_asked_too_often_to_give_one_back_is_not_waited_for_as_long_as_for_an_engine(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    pauses: list[float] = []

    def uniform(least: float, most: float) -> float:
        pauses.append(most)
        assert len(pauses) < 20
        return 0.0

    monkeypatch.setattr("random.uniform", uniform)
    first = lease(60.0)
    assert first.acquire()
    with fast_retries(monkeypatch), first.held():
        store.fault = failing("DELETE", status=503, code="SlowDown")
    assert "the lease was not released" in caplog.text
    assert len(pauses) == 5  # the next one would be 16 seconds


ADDRESS = S3Address.parse("s3://models/engines")
ENTRY, LEASE, FAILED = (f"engines/{KEY}{suffix}" for suffix in (".json", ".lease", ".failed"))


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
    for module in (fleet_cache, s3):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
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


def test_the_second_machine_fetches_what_the_first_compiled(store: Store, tmp_path: Path) -> None:
    build = Builder()
    lines = provide(tmp_path / "a", build)
    assert whole(tmp_path / "a") and build.calls == 1
    assert not [line for line in lines if not line.startswith("uploading to s3://models/engines/")]
    (folder,) = {key.split("/")[2] for key in store.objects if key.startswith(f"engines/{KEY}/")}
    files = [f"engines/{KEY}/{folder}/manifest.json", f"engines/{KEY}/{folder}/model.bin"]
    assert sorted(store.objects) == sorted([ENTRY, *files])
    entry = msgspec.json.decode(store.objects[ENTRY].path.read_bytes())
    assert entry == {"folder": folder, "manifest": msgspec.to_builtins(Manifest.read(tmp_path / "a" / KEY))}
    lines = provide(tmp_path / "b", build)
    assert whole(tmp_path / "b") and build.calls == 1
    assert lines[-1] == f"downloaded the engine from s3://models/engines/{KEY}/{folder}"
    assert [path.name for path in (tmp_path / "b").iterdir()] == [KEY]
    # The manifest is written last, as where it was compiled.
    first, last = sorted((tmp_path / "b" / KEY).iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert (first.name, last.name) == ("model.bin", "manifest.json")
    assert EngineCache(tmp_path / "b").lookup(KEY) is not None
    del store.objects[ENTRY]  # files without their entry do not count
    provide(tmp_path / "c", build)
    assert whole(tmp_path / "c") and build.calls == 2


@pytest.mark.parametrize("call", ["GET .json", "PUT .lease", "PUT model.bin", "PUT .json", "DELETE .lease"])
@pytest.mark.usefixtures("clock")  # the pauses count, and not the time that passes on a busy machine
def test_a_store_that_is_asked_too_often_is_waited_for(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    method, part = call.split()
    refused = iter(range(20))  # botocore repeats less often

    def fault(request: Request) -> None:
        if request.method == method and request.key.endswith(part) and next(refused, None) is not None:
            raise Fault(503, "SlowDown")

    store.fault = fault
    monkeypatch.setattr("random.uniform", lambda least, most: 0.0)
    with fast_retries(monkeypatch):
        lines = provide(tmp_path / "a", Builder())
    assert not [line for line in lines if not line.startswith("uploading to")]
    assert next(refused, None) is None and LEASE not in store.objects and ENTRY in store.objects


# -- waiting for another machine -----------------------------------------------------------------------------------


def test_what_another_machine_compiles_meanwhile_is_fetched(store: Store, tmp_path: Path, clock: Clock) -> None:
    assert Lease(S3Address(BUCKET, LEASE), 60.0).acquire()
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


@pytest.mark.parametrize(
    ("seconds", "settings", "slept"), [(8.0, {"lease_seconds": 8.0}, [2.0] * 5), (60.0, {}, [3.0] * 21)]
)
def test_a_machine_that_died_is_succeeded(
    store: Store, tmp_path: Path, clock: Clock, seconds: float, settings: dict[str, float], slept: list[float]
) -> None:
    assert Lease(S3Address(BUCKET, LEASE), seconds).acquire()
    clock.meanwhile = lambda now: setattr(store, "seconds", store.seconds + clock.slept[-1])
    build = Builder()
    provide(tmp_path / "a", build, **settings)
    assert whole(tmp_path / "a") and build.calls == 1
    assert clock.slept == slept


def test_a_wait_that_is_too_long_ends_in_compiling_here(store: Store, tmp_path: Path, clock: Clock) -> None:
    assert Lease(S3Address(BUCKET, LEASE), 60.0).acquire()
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


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.bin", b"\1" * 10_000, "model.bin: changed, same size and a different SHA-256"),
        ("manifest.json", b"{", "manifest.json is broken"),
        ("manifest.json", b"{}", "manifest.json is broken"),
        (f"{KEY}.json", b'{"folder": "x", "manifest": {}}', "its manifest is missing or a different one"),
        (f"{KEY}.json", b"{", ""),
    ],
)
def test_a_damaged_engine_is_removed_and_compiled_again(
    store: Store, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    build = Builder()
    provide(tmp_path / "a", build)
    store.put(f"engines/{KEY}/x/model.bin", b"")
    (key,) = (key for key in store.objects if key.endswith(name) and "/x/" not in key)
    store.put(key, content)
    lines = provide(tmp_path / "b", build)
    assert whole(tmp_path / "b") and build.calls == 2
    said = [line for line in lines if "is damaged (" in line]
    assert len(said) == bool(says) and all(says in line and f"s3://models/engines/{KEY}/" in line for line in said)
    provide(tmp_path / "c", build)
    assert whole(tmp_path / "c") and build.calls == 2


@pytest.mark.parametrize("during_a_download", [False, True])
def test_an_engine_whose_files_a_lifecycle_rule_or_pruning_removed_is_compiled_again(
    store: Store, tmp_path: Path, during_a_download: bool
) -> None:
    build = Builder()
    provide(tmp_path / "a", build)
    gone = [key for key in store.objects if key.startswith(f"engines/{KEY}/")]

    def remove(request: Request) -> None:
        if request.method == "GET" and request.key in gone and request.key in store.objects:
            for key in gone:
                del store.objects[key]
            raise Fault(404, "NoSuchKey")

    if during_a_download:
        store.fault = remove
    else:
        for key in gone:
            del store.objects[key]
    lines = provide(tmp_path / "b", build)
    assert any("it has no files" in line for line in lines)
    assert whole(tmp_path / "b") and build.calls == 2
    provide(tmp_path / "c", build)
    assert whole(tmp_path / "c") and build.calls == 2


def test_an_engine_whose_files_cannot_be_read_now_stays(store: Store, tmp_path: Path) -> None:
    provide(tmp_path / "other", Builder())
    before = dict(store.objects)
    store.fault = failing("GET HEAD", "/model.bin")
    (line,) = [line for line in provide(tmp_path / "a", Builder()) if "cannot be used" in line]
    assert "access is denied" in line and whole(tmp_path / "a") and store.objects == before


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


@pytest.mark.parametrize(("method", "part"), [("GET", ".json"), ("PUT", ".lease"), ("DELETE", ".json"), ("", "")])
def test_a_store_that_cannot_be_used_is_reported_and_does_not_stop_serving(
    store: Store, tmp_path: Path, method: str, part: str
) -> None:
    store.put(ENTRY, b"{")  # which wants removing
    store.fault = failing(method, part) if method else failing(ALL, status=404, code="NoSuchBucket")
    build = Builder()
    (line,) = provide(tmp_path / "a", build)
    assert line.startswith(f"the engine cache {ADDRESS} cannot be used: s3://models/engines/{KEY}.")
    assert line.endswith("; compiling here") and ("access is denied" if method else "no such bucket") in line
    assert whole(tmp_path / "a") and build.calls == 1


@pytest.mark.parametrize("part", ["/model.bin", f"{KEY}.json"])
@pytest.mark.parametrize("overtaken", [False, True])
def test_an_engine_that_cannot_be_uploaded_serves_all_the_same(
    store: Store, tmp_path: Path, part: str, overtaken: bool
) -> None:
    others = msgspec.json.encode({"folder": "x", "manifest": {}})

    def another(request: Request) -> None:
        if (request.method, request.key) == ("PUT", ENTRY):
            store.put(ENTRY, others)

    store.fault = another if overtaken else failing("PUT", part)
    build = Builder()
    lines = provide(tmp_path / "a", build)
    assert whole(tmp_path / "a") and build.calls == 1 and LEASE not in store.objects
    if overtaken:  # the engine of a machine that was first is as good
        assert store.objects[ENTRY].path.read_bytes() == others and "not uploaded" not in lines[-1]
        assert list(store.objects) == [ENTRY], "its own folder goes"
    else:
        assert store.objects == {}
        assert lines[-1].startswith("the engine was not uploaded: ") and "access is denied" in lines[-1]


# -- a compile that fails ------------------------------------------------------------------------------------------


def fail(out: Path) -> None:
    raise BuildError("this architecture is not supported")


def test_a_compile_that_failed_fails_for_all_machines_for_ten_minutes(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BuildError):
        provide(tmp_path / "a", fail)
    assert list(store.objects) == [FAILED]
    build = Builder()
    store.seconds += 600
    with pytest.raises(EngineError, match=r"(?s)cache prune s3://models/engines.*this architecture is not supported"):
        provide(tmp_path / "b", build)
    assert build.calls == 0
    store.seconds += 1
    provide(tmp_path / "b", build)
    assert whole(tmp_path / "b") and build.calls == 1


@pytest.mark.parametrize("error", [BuildError("no room", cause="no space on the disk"), EngineError("no"), OSError()])
def test_what_is_one_machines_own_failure_stops_no_other(store: Store, tmp_path: Path, error: Exception) -> None:
    def fail(out: Path) -> None:
        assert LEASE in store.objects
        raise error

    with pytest.raises(type(error)):
        provide(tmp_path / "a", fail)
    assert store.objects == {}


def test_a_failure_that_cannot_be_written_or_read_stops_no_machine(store: Store, tmp_path: Path) -> None:
    store.fault = failing("PUT", ".failed")
    with pytest.raises(BuildError):
        provide(tmp_path / "a", fail)
    store.fault = None
    store.put(FAILED, b"{")
    provide(tmp_path / "b", Builder())
    assert whole(tmp_path / "b")


# -- pruning -------------------------------------------------------------------------------------------------------


def prune(keep: int = 0) -> tuple[int, list[str]]:
    lines: list[str] = []
    return FleetCache(ADDRESS).prune(keep, lines.append), lines


def engine(store: Store, number: int, size: int = 1000) -> str:
    """An engine of the cache; its key."""
    key = f"tensorrt_llm-{number:032x}"
    store.put(f"engines/{key}/f/model.bin", bytes(size))
    store.put(f"engines/{key}.json", msgspec.json.encode({"folder": "f", "manifest": {}}))
    return key


def test_pruning_leaves_nothing_of_an_engine_cache_and_everything_else(store: Store) -> None:
    key = engine(store, 1)
    store.put(f"engines/{key}/of-a-machine-that-died/model.bin", b"")
    store.put(f"engines/{key}.failed", b"{}")
    store.put(f"engines/{engine(store, 2)}.lease", b"died")
    store.seconds += 61
    others = ["engines/README", "engines/llama/config.json", "engines-2/a.json", f"{key}.json"]
    for other in others:
        store.put(other, b"")
    removed, lines = prune()
    assert sorted(store.objects) == sorted(others)
    assert removed > 2000 and any("2 objects under s3://models/engines are not" in line for line in lines)


def test_an_engine_that_a_machine_compiles_now_stays(store: Store) -> None:
    key = engine(store, 1)
    assert Lease(S3Address(BUCKET, f"engines/{key}.lease"), 60.0).acquire()
    before = dict(store.objects)
    removed, lines = prune()
    assert (removed, store.objects) == (0, before) and lines == [f"{key} stays: a machine is compiling it"]


def test_the_engines_that_were_compiled_last_are_kept_and_leftovers_are_not(store: Store) -> None:
    keys = []
    for number in (3, 1, 2):
        store.seconds += 1
        keys.append(engine(store, number))
    store.put(f"engines/{keys[-1]}/left/model.bin", bytes(10))
    removed, _ = prune(2500)
    assert sorted(store.objects) == sorted(
        f"engines/{key}{name}" for key in keys[1:] for name in (".json", "/f/model.bin")
    )
    assert removed > 1010


def test_an_engine_is_as_old_as_its_entry_whatever_was_left_beside_it_later(store: Store) -> None:
    old = engine(store, 1)
    store.seconds += 1
    new = engine(store, 2)
    store.seconds += 1
    store.put(f"engines/{old}/left/model.bin", b"")
    prune(1500)
    assert {f"engines/{new}.json"} == {key for key in store.objects if key.endswith(".json")}


def test_after_the_first_engine_that_does_not_fit_no_older_one_stays(store: Store) -> None:
    for number, size in ((1, 10), (2, 2000), (3, 1000)):
        last = engine(store, number, size)
        store.seconds += 1
    prune(1500)
    assert sorted(store.objects) == [f"engines/{last}.json", f"engines/{last}/f/model.bin"]


def test_an_entry_without_files_goes(store: Store) -> None:
    del store.objects[f"engines/{engine(store, 1)}/f/model.bin"]
    prune(1500)
    assert store.objects == {}


@pytest.mark.parametrize(
    ("before", "name"),
    [(("GET", ".json"), ".lease"), (("DELETE", ".lease"), ".lease"), (("DELETE", ".json"), ".json")],
)
def test_what_another_machine_writes_while_pruning_looks_stays(
    store: Store, before: tuple[str, str], name: str
) -> None:
    key = engine(store, 1)
    store.put(f"engines/{key}.lease", b"died")
    store.seconds += 61
    method, part = before

    def write(request: Request) -> None:
        if (request.method, request.key) == (method, f"engines/{key}{part}"):
            store.put(f"engines/{key}{name}", b'{"folder": "another", "manifest": {}}')

    store.fault = write
    prune()
    assert list(store.objects) == [f"engines/{key}{name}"]


def test_an_engine_that_becomes_complete_while_pruning_looks_stays(store: Store) -> None:
    key = engine(store, 1)
    entry = store.objects.pop(f"engines/{key}.json")
    store.put(f"engines/{key}.lease", b"given back just now")
    store.seconds += 61

    def complete(request: Request) -> None:
        if request.method == "HEAD":
            store.objects[f"engines/{key}.json"] = entry

    store.fault = complete
    removed, lines = prune()
    assert (removed, len(store.objects)) == (0, 3) and lines == [f"{key} stays: a machine has just compiled it"]


def test_an_upload_ends_unless_a_machine_goes_on_with_it_or_has_completed_it(store: Store) -> None:
    keys = [engine(store, number) for number in (1, 2, 3)]
    store.uploads |= {f"{key}-{part}": f"engines/{key}/g/{part}" for key in keys for part in "ab"}
    store.uploads |= {"another's": "engines/README", "elsewhere": f"another/{keys[2]}/g/a"}
    going_on, completed, _ = keys

    def meanwhile(request: Request) -> None:
        if request.method == "UPLOADS":
            store.put(f"engines/{going_on}.lease", b"another's")
            del store.uploads[f"{completed}-a"]

    store.fault = meanwhile
    _, lines = prune(10_000)
    assert sorted(store.uploads) == sorted([f"{going_on}-a", f"{going_on}-b", "another's", "elsewhere"])
    assert len([line for line in lines if "incomplete upload" in line]) == 3


def test_pruning_many_objects_takes_few_requests(store: Store) -> None:
    key = engine(store, 1)
    for number in range(2_500):
        store.objects[f"engines/{key}/f/{number}"] = store.objects[f"engines/{key}/f/model.bin"]
    prune()
    assert store.objects == {} and len(store.requests) < 20


# -- Machines that share an engine cache in S3, each a process, of which one is killed.


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto_server() as url:
        for name, value in variables(url).items():
            monkeypatch.setenv(name, value)
        yield url


@pytest.mark.slow
def test_several_machines_compile_once(aws: str, tmp_path: Path) -> None:
    # The lease is so long that no machine's pause makes it lose the lease.
    with started("race", tmp_path, *"abc", lease=600.0) as processes:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 3)
        (tmp_path / "go").touch()
        assert [process.wait(300) for process in processes] == [0] * 3
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert len(list(tmp_path.glob("served-by-*"))) == 3


@pytest.mark.slow
def test_a_killed_builder_is_succeeded_and_leaves_no_entry(aws: str, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with started("half", tmp_path, "killed", lease=3.0):
        wait_until((tmp_path / "built-by-killed").exists)
    assert f"engines/{KEY}.json" not in keys(aws)
    with started("race", tmp_path, "next", lease=3.0) as (following,):
        assert following.wait(300) == 0
    assert (tmp_path / "built-by-next").exists() and (tmp_path / "served-by-next").exists()
