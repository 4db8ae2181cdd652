"""An engine cache in S3: one machine compiles, whatever happens to it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from djl_trtllm.engine.fleet_cache import FleetCache
from djl_trtllm.engine.lease import Lease
from djl_trtllm.engine.manifest import Manifest
from djl_trtllm.engine.staging import staged
from djl_trtllm.errors import EngineError
from djl_trtllm.model.remote.s3 import S3Address
from tests.support.moto_server import BUCKET, client, keys, moto_server
from tests.support.s3_server import variables

from .fleet_process import ADDRESS, KEY
from .helpers import wait_until


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto_server() as url:
        for name, value in variables(url).items():
            monkeypatch.setenv(name, value)
        yield url


class Builder:
    """Builds at once and counts."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls = 0
        self._seconds = seconds

    def __call__(self, out: Path) -> None:
        self.calls += 1
        with staged(out) as partial:
            time.sleep(self._seconds)
            (partial / "model.bin").write_bytes(b"the whole engine")
            Manifest.of(partial, backend="openvino", checkpoint="x", options={}, versions={}, platform="x86_64").write(
                partial
            )


def provide(out: Path, build: Builder, lines: list[str] | None = None, **settings: float) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [] if lines is None else lines
    FleetCache(ADDRESS, **{"lease_seconds": 2.0, **settings}).provide(KEY, out, build, lines.append)
    return out


def whole(directory: Path) -> bool:
    manifest = Manifest.read(directory)
    return manifest is not None and not manifest.verify(directory)


def start(what: str, root: Path, name: str, lease_seconds: float = 4.0) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("fleet_process.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, str(script), what, str(root), name, str(lease_seconds)], env=environment)


def test_the_second_machine_fetches_what_the_first_compiled(aws: str, tmp_path: Path) -> None:
    build = Builder()
    assert whole(provide(tmp_path / "a" / KEY, build))
    assert whole(provide(tmp_path / "b" / KEY, build))
    assert build.calls == 1
    assert not list((tmp_path / "b").glob(".*"))


def test_eight_machines_compile_once(aws: str, tmp_path: Path) -> None:
    processes = [start("race", tmp_path, f"machine-{number}") for number in range(8)]
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 8)
    (tmp_path / "go").touch()
    assert [process.wait(120) for process in processes] == [0] * 8
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert len(list(tmp_path.glob("served-by-*"))) == 8


def test_a_killed_builder_is_succeeded_and_leaves_no_entry(aws: str, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    killed = start("half", tmp_path, "killed", 3.0)
    wait_until(lambda: (tmp_path / "built-by-killed").exists())
    others = [start("race", tmp_path, f"machine-{number}", 3.0) for number in range(7)]
    wait_until(lambda: len(list(tmp_path.glob("ready-machine-*"))) == 7)
    killed.kill()
    killed.wait()
    assert f"engines/{KEY}.json" not in keys(aws)
    assert [process.wait(120) for process in others] == [0] * 7
    assert len(list(tmp_path.glob("built-by-machine-*"))) == 1
    assert len(list(tmp_path.glob("served-by-*"))) == 7


def test_a_damaged_engine_is_removed_and_compiled_again(aws: str, tmp_path: Path) -> None:
    build, lines = Builder(), list[str]()
    provide(tmp_path / "a" / KEY, build)
    (damaged,) = (key for key in keys(aws) if key.endswith("model.bin"))
    client(aws).put_object(Bucket=BUCKET, Key=damaged, Body=b"the whole enginE")
    assert whole(provide(tmp_path / "b" / KEY, build, lines))
    assert build.calls == 2
    assert any("is damaged (model.bin: changed" in line for line in lines)
    assert whole(provide(tmp_path / "c" / KEY, build))
    assert build.calls == 2


def test_files_without_their_entry_do_not_count(aws: str, tmp_path: Path) -> None:
    build = Builder()
    provide(tmp_path / "a" / KEY, build)
    client(aws).delete_object(Bucket=BUCKET, Key=f"engines/{KEY}.json")
    assert whole(provide(tmp_path / "b" / KEY, build))
    assert build.calls == 2


def test_a_wait_that_is_too_long_ends_in_compiling_here(aws: str, tmp_path: Path) -> None:
    lease = Lease(BUCKET, f"engines/{KEY}.lease", 60.0)
    assert lease.acquire()
    build, lines = Builder(), list[str]()
    assert whole(provide(tmp_path / "a" / KEY, build, lines, lease_seconds=60.0, wait_seconds=0.0))
    assert build.calls == 1
    assert any("compiling here as well" in line for line in lines)


def test_a_store_that_cannot_be_used_is_told_and_does_not_stop_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    build, lines = Builder(), list[str]()
    assert whole(provide(tmp_path / "a" / KEY, build, lines))
    assert any("cannot be reached" in line and "compiling here" in line for line in lines)


def test_a_bucket_that_is_missing_is_told(aws: str, tmp_path: Path) -> None:
    lines: list[str] = []
    fleet = FleetCache(S3Address.parse("s3://no-such-bucket/x"))
    fleet.provide(KEY, tmp_path / KEY, Builder(), lines.append)
    assert whole(tmp_path / KEY)
    assert any("no such bucket" in line for line in lines)


def test_a_failed_compile_gives_the_lease_back(aws: str, tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        raise EngineError("no")

    with pytest.raises(EngineError, match="no"):
        FleetCache(ADDRESS).provide(KEY, tmp_path / KEY, fail, lambda line: None)
    assert keys(aws) == []


def test_waiting_can_be_cancelled(aws: str, tmp_path: Path) -> None:
    assert Lease(BUCKET, f"engines/{KEY}.lease", 60.0).acquire()
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(EngineError, match="cancelled"):
        FleetCache(ADDRESS).provide(KEY, tmp_path / KEY, Builder(), lambda line: None, cancel=cancel)


def test_a_lease_is_had_once_renewed_while_held_and_taken_over_when_it_expired(aws: str) -> None:
    first, second = (Lease(BUCKET, "lease", 1.0) for _ in range(2))
    assert first.acquire()
    with first.held():
        time.sleep(2.5)
        assert not second.acquire()
    assert second.acquire()
    assert not first.acquire()
    time.sleep(2.5)
    assert first.acquire()


def test_a_lease_that_was_taken_over_is_not_given_back(aws: str) -> None:
    first = Lease(BUCKET, "lease", 3600.0)
    assert first.acquire()
    with first.held():
        client(aws).put_object(Bucket=BUCKET, Key="lease", Body=b"another's")
    assert keys(aws) == ["lease"]
