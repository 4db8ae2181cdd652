"""The disk with TMPDIR and the cache is full, and the engine process is killed: its successor needs a folder there."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.faults.kind import Case, Kind, Row
from tests.faults.load import repeated, row_of
from tests.faults.strikes import engine_replaced


def run(case: Case) -> Iterator[Row]:
    disk = case.folder / "disk"
    disk.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        yield Row("disk full", case.engine, note="not run: mounting a disk needs root")
        return
    try:
        with case.server(TMPDIR=str(disk), DJL_CACHE_DIR=str(disk)) as server:
            fill(disk)

            def strike() -> None:
                with engine_replaced(server):
                    server.host().kill()

            yield row_of("disk full, engine killed", case.engine, server, case.streams, repeated(case.times, strike))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> None:
    """Write until there is no room for a byte."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


KIND = Kind("disk_full", run)
