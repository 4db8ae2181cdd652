from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from djl_trtllm.engines.cache import Leftover, find_leftovers
from djl_trtllm.model import work_directory
from djl_trtllm.model.work_directory import TEMPORARY_PREFIX, marked
from tests.engines.helpers import KEY, build, locked
from tests.support.processes import wait_until

DEAD = 2**22 + 1
"""More than any process id."""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this test alone; those just made count too."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    monkeypatch.setattr(work_directory, "_SHARED_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(work_directory, "_SETTLED_SECONDS", -1.0)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir()
    return path


def names(root: Path) -> list[str]:
    return [item.path.name for item in find_leftovers(root)]


def file(path: Path, size: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return path


def test_an_empty_cache_and_whole_engines_have_no_leftovers(root: Path) -> None:
    assert names(root / "not there") == []
    build(root / KEY)
    (root / f"{KEY}.lock").touch()
    file(root / f"{KEY}.log")
    assert names(root) == []


def test_what_a_killed_builder_left_in_the_cache(root: Path, temporary: Path) -> None:
    file(root / f".{KEY}.{DEAD}.abcd.partial" / "model.bin", 100)
    file(root / f".{KEY}.removed" / "model.bin")
    file(root / "openvino-failed.log")
    (root / "openvino-half.lock").touch()
    file(root / "openvino-half" / "model.bin")
    file(root / "hashes" / ".aaaa.json.bbbb")
    file(temporary / f"{TEMPORARY_PREFIX}x" / "torch")
    found = find_leftovers(root)
    assert {item.path.name: item.size for item in found} == {
        f".{KEY}.{DEAD}.abcd.partial": 100,
        f".{KEY}.removed": 7,
        "openvino-failed.log": 7,
        "openvino-half": 7,
        ".aaaa.json.bbbb": 7,
        f"{TEMPORARY_PREFIX}x": 7,
    }
    for item in found:
        item.remove()
    assert names(root) == []


def test_what_a_builder_works_on_or_another_user_owns_stays(
    root: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = file(root / f".{KEY}.1.abcd.partial" / "model.bin").parent
    work = file(temporary / f"{TEMPORARY_PREFIX}x" / "torch").parent
    outgoing = file(root / "outgoing" / "bucket" / "model.bin").parent  # an engine that was not uploaded
    file(root / f"{KEY}.log")
    file(root / f".{KEY}.removed" / "model.bin")
    file(root / KEY / "model.bin")
    with locked(root / f"{KEY}.lock"), marked(partial), marked(work), marked(outgoing):
        assert names(root) == []
    assert len(names(root)) == 6
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: work.stat().st_uid + 1)
        assert work.name not in names(root) and len(names(root)) == 5
    for item in (*find_leftovers(root), Leftover(root / "gone", 0)):
        item.remove()
    assert names(root) == []


@pytest.mark.parametrize("place", ["models/.abc.partial-xyz", "downloads/s3/model-1/.v1.partial"])
def test_interrupted_downloads_are_leftovers_unless_they_go_on(root: Path, place: str) -> None:
    partial = root / place
    file(partial / "model.safetensors")
    lock = partial.with_name(".abc.lock" if place.startswith("models") else ".lock")
    lock.touch()
    with locked(lock):
        assert names(root) == []
    assert names(root) == [partial.name]


_COMPILE = """
import sys
from pathlib import Path
from djl_trtllm.config import load
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines import build
from djl_trtllm.model import inspect
checkpoint, root, *command = sys.argv[1:]
config, layout = load(None, {"OPTION_ENGINE_CACHE_DIR": root}), inspect(Path(checkpoint))
plan = plan_engine(config, layout)
original = build.build_engine
def quick(*arguments, **options):
    return original(*arguments, command=command, **options)
build.build_engine = quick
print("started", flush=True)
build.prepare_engine(config, layout, print, plan=plan)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_at_any_moment_leaves_nothing_that_prune_does_not_remove(
    checkpoint: Path,
    root: Path,
    temporary: Path,
    fake_compiler: Callable[..., list[str]],
    number: signal.Signals,
) -> None:
    moments = random.Random(number)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _COMPILE, str(checkpoint), str(root), *fake_compiler("slow")],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moments.uniform(0, 0.6))
        process.send_signal(number)
        process.wait()
        process.stdout.close()

        def is_clean() -> bool:
            # The compiler ends by itself when its parent is gone.
            for item in find_leftovers(root):
                item.remove()
            return not [path for folder in (root, temporary) for path in folder.iterdir() if not _stays(path)]

        wait_until(is_clean, 60)


def _stays(path: Path) -> bool:
    """Whether it is an engine, the log of one in the cache or an empty lock."""
    if path.suffix in (".lock", ".use"):
        return path.stat().st_size == 0
    return (path.with_suffix("") / "manifest.json").is_file()
