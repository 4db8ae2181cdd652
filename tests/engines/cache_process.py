"""One of several processes on one cache: `cache_process.py race|half|half-in-place|use ROOT`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.engines.staging import staged
from tests.engines.cache_entries import KEY, seal


def race(root: Path) -> None:
    """Wait for the start, get the engine, say whether this process built it and whether it was whole."""

    def build(out: Path) -> None:
        (root / f"built-by-{os.getpid()}").touch()
        with staged(out) as partial:
            (partial / "model.bin").write_bytes(b"half")
            time.sleep(0.5)
            (partial / "model.bin").write_bytes(b"the whole engine")
            seal(partial)

    (root / f"ready-{os.getpid()}").touch()
    while not (root / "go").exists():
        time.sleep(0.01)
    entry = EngineCache(root / "cache").get_or_build(KEY, build, print)
    manifest = Manifest.read(entry)
    if manifest is not None and not manifest.verify(entry):
        (root / f"served-by-{os.getpid()}").touch()


def half(root: Path, *, in_place: bool) -> None:
    """Build half an engine and wait to be killed."""

    def fill(directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "model.bin").write_bytes(b"half")
        (root / "half").touch()
        time.sleep(600)

    def build(out: Path) -> None:
        if in_place:
            fill(out)
        else:
            with staged(out) as partial:
                fill(partial)

    EngineCache(root / "cache").get_or_build(KEY, build, print)


def use(root: Path) -> None:
    """Use the engine and wait to be killed."""
    assert EngineCache(root / "cache").lookup(KEY) is not None
    (root / "using").touch()
    time.sleep(600)


if __name__ == "__main__":
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "race":
        race(path)
    elif what == "use":
        use(path)
    else:
        half(path, in_place=what == "half-in-place")
