"""Eight machines that share an engine cache in S3, of which the answer of the store to one call gets lost.

The store has done what it was asked, which the machine cannot know: it asks again, and is refused by its own success.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from djl_trtllm.engines import fleet_cache
from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.engines.fleet_cache import FleetCache
from djl_trtllm.errors import BuildError, EngineError
from djl_trtllm.model.remote.s3 import S3Address
from tests.engines.helpers import KEY, Builder
from tests.support.s3 import (
    MINIO,
    MINIO_SECRET,
    MOTO_BUCKET,
    client,
    keys,
    losing,
    minio_server,
    moto_server,
    variables,
)

pytestmark = pytest.mark.slow

MACHINES = 8
_IN_PARTS = 65 << 20
"""Bytes of a file that is uploaded in parts."""
ADDRESS = S3Address(MOTO_BUCKET, "engines")
SUCCESS = [
    f"GET {KEY}.json",
    "GET .failed",
    "PUT .lease",
    "GET .lease",
    "DELETE .lease",
    "PUT model.bin",
    f"PUT {KEY}.json",
    "GET prefix=",
    "GET model.bin",
    "HEAD model.bin",
    "",
]
FAILURE = [f"GET {KEY}.json", "GET .failed", "PUT .lease", "PUT .failed", "DELETE .lease"]


class Lost:
    """Loses the answers to the first calls of a kind: a method, and what its path or query contains."""

    def __init__(self) -> None:
        self.arm("")

    def arm(self, call: str, times: int = MACHINES) -> None:
        """Lose this number of answers from now on."""
        self._method, _, self._part = call.partition(" ")
        self.left = times if call else 0
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str) -> bool:
        with self._lock:
            if not self.left or method != self._method or self._part not in path:
                return False
            self.left -= 1
            return True


@pytest.fixture(scope="module")
def lost() -> Lost:
    return Lost()


@pytest.fixture(
    scope="module",
    params=["moto", pytest.param("minio", marks=pytest.mark.skipif(MINIO is None, reason="no minio in PATH"))],
)
def store(request: pytest.FixtureRequest, lost: Lost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The environment of a machine, whose store is behind a proxy that loses answers."""
    on_moto = request.param == "moto"
    starting = moto_server() if on_moto else minio_server(tmp_path_factory.mktemp("minio"))
    with starting as endpoint, losing(endpoint, lost) as proxy, pytest.MonkeyPatch.context() as patch:
        secret = "test" if on_moto else MINIO_SECRET
        for name, value in variables(proxy, secret).items():
            patch.setenv(name, value)
        yield [endpoint, secret]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(seconds / 10))
    monkeypatch.setattr(fleet_cache, "time", quick)


def provide(build: Callable[[Path], None], machine: Path) -> Path | EngineError:
    """The engine on a machine, or why it has none."""
    machine.mkdir()
    # A machine that does not know its own lease compiles after the wait, as one too many.
    fleet = FleetCache(ADDRESS, lease_seconds=600.0, wait_seconds=30.0)
    try:
        return EngineCache(machine).get_or_build(KEY, partial(fleet.provide, KEY, build=build, progress=print), print)
    except EngineError as error:
        return error


def all_machines(build: Callable[[Path], None], folder: Path) -> list[Path | EngineError]:
    with ThreadPoolExecutor(MACHINES) as machines:
        return list(machines.map(partial(provide, build), [folder / str(number) for number in range(MACHINES)]))


def prune_all(store: list[str]) -> None:
    FleetCache(ADDRESS).prune(0, print)
    endpoint, secret = store
    assert keys(endpoint, secret=secret) == []
    if secret != MINIO_SECRET:  # MinIO lists uploads by the whole key only, and ends old ones itself
        assert "Uploads" not in client(endpoint).list_multipart_uploads(Bucket=MOTO_BUCKET)


@pytest.mark.parametrize("call", SUCCESS)
def test_one_machine_compiles_whatever_answer_is_lost(store: list[str], lost: Lost, tmp_path: Path, call: str) -> None:
    build = Builder()
    lost.arm(call)
    ended = all_machines(build, tmp_path)
    assert not call or lost.left < MACHINES, "the call was made"
    lost.arm("")
    assert build.calls == 1
    assert [path for path in ended if isinstance(path, Path)] == ended
    folders = {key.split("/")[2] for key in keys(store[0], f"engines/{KEY}/", store[1])}
    assert len(folders) == 1, "those of losers are gone"
    lost.arm("POST delete", 1)
    prune_all(store)


@pytest.mark.parametrize("call", ["POST uploads", "PUT partNumber=1", "POST uploadId="])
def test_a_large_file_is_uploaded_whatever_answer_is_lost(
    store: list[str], lost: Lost, tmp_path: Path, call: str
) -> None:
    lost.arm(call)
    provide(Builder(_IN_PARTS), tmp_path / "a")
    assert lost.left < MACHINES, "the call was made"
    lost.arm("")
    assert f"engines/{KEY}.json" in keys(store[0], secret=store[1])
    prune_all(store)


@pytest.mark.parametrize("call", FAILURE)
def test_one_machine_fails_for_all_whatever_answer_is_lost(
    store: list[str], lost: Lost, tmp_path: Path, call: str
) -> None:
    calls: list[Path] = []

    def fail(out: Path) -> None:
        calls.append(out)
        raise BuildError("this architecture is not supported")

    lost.arm(call)
    ended = all_machines(fail, tmp_path)
    assert lost.left < MACHINES, "the call was made"
    lost.arm("")
    assert len(calls) == 1
    assert all("this architecture is not supported" in str(error) for error in ended)
    prune_all(store)
    build = Builder()
    assert isinstance(provide(build, tmp_path / "after"), Path), "pruning lets them try again"
    prune_all(store)
