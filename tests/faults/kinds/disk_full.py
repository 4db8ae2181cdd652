"""The disk with TMPDIR and the cache is full: the engine process is killed, or another model's engine is compiled."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.faults.kind import Case, Kind, Row
from tests.faults.load import Load, repeated, row_of
from tests.faults.strikes import engine_replaced
from tests.support.models import TINY_STORIES, tensorrt_llm_model

_SIZE = 64 << 20
_SPARE = {"openvino": 2 << 20}
"""So far its compiler gets: the engine has 7 MB. Others find no room at all."""


def run(case: Case) -> Iterator[Row]:
    disk = case.folder / "disk"
    disk.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", disk], capture_output=True).returncode:
        yield Row("disk full", case.engine, skipped=True, note="not run: mounting a disk needs root")
        return
    try:
        yield _engine_killed(case, disk)
        if case.engine != "scripted":  # it compiles nothing
            yield _engine_compiled(case, disk)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _engine_killed(case: Case, disk: Path) -> Row:
    """The successor of the engine process needs a folder there."""
    with case.server(TMPDIR=str(disk), DJL_CACHE_DIR=str(disk)) as server:
        filler = _fill(disk)

        def strike() -> None:
            with engine_replaced(server):
                server.host().kill()

        row = row_of("disk full, engine killed", case.engine, server, case.streams, repeated(case.times, strike))
        filler.unlink()
    return row


def _engine_compiled(case: Case, disk: Path) -> Row:
    """A checkpoint is registered on the server, which has to compile it; again when there is room."""
    store = case.folder / "store"
    store.mkdir()
    with case.server(TMPDIR=str(disk), DJL_CACHE_DIR=str(disk), SERVING_MODEL_STORE=str(store)) as server:
        _checkpoint(case, store / "compiled")
        filler = _fill(disk, _SPARE.get(case.engine, 0))
        told: list[str] = []

        def cause(load: Load) -> None:
            refused = server.http.post("/models", params={"url": "compiled"})
            assert refused.status_code >= 400, refused.text
            assert any(said in refused.text for said in ("no space on the disk", "No space left on device")), (
                refused.text
            )
            assert not list(disk.rglob("openvino_model.*")) and not list(disk.rglob("rank0.engine"))
            told.append(f"registering it: {refused.status_code}, and 200 when there is room")
            load.wait_for_parts(2 * case.streams)

        row = row_of("disk full, engine compiled", case.engine, server, case.streams, cause)
        filler.unlink()
        made = server.http.post("/models", params={"url": "compiled"})
        assert made.status_code == 200, made.text
        row.note = row.note or told[0]
    return row


def _checkpoint(case: Case, to: Path) -> None:
    if case.engine == "openvino":
        shutil.copytree(TINY_STORIES, to, ignore=shutil.ignore_patterns("engine"))
    else:
        limits = {"option.max_rolling_batch_size": 4, "option.max_seq_len": 1024, "option.max_output_len": 512}
        tensorrt_llm_model(to, **{"option.backend": "tensorrt", **limits})


def _fill(disk: Path, spare: int = 0) -> Path:
    """Write a file until there is no room for a byte, and take back `spare` bytes of it."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    os.truncate(filler, filler.stat().st_size - spare)
    return filler


KIND = Kind("disk_full", run, short=("scripted", "tensorrt_llm"))
