"""Hostile archives: each is extracted or refused, and nothing is written outside."""

from __future__ import annotations

import io
import random
import shutil
import tarfile
import tempfile
from pathlib import Path

from djl_trtllm.errors import ArchiveError
from djl_trtllm.model.archive import extract
from tests.faults.fuzz.damage import damaged

_KINDS = (*[tarfile.REGTYPE] * 6, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
          tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, b"\xff")  # fmt: skip
_ABSOLUTE = Path("/etc/of-a-hostile-archive")
_PATHS = (
    "config.json",
    "a/b",
    "../x",
    str(_ABSOLUTE),
    "a/../../x",
    "a" * 300,
    "d/" * 40 + "x",
    "",
    ".",
    "a\0b",
    "ü\udcff",
    "a",
)


def hostile_archive(source: random.Random) -> bytes:
    """A tar of random members, which may be compressed, and is damaged every other time."""
    target = io.BytesIO()
    mode = source.choice(("w", "w:gz", "w:bz2", "w:xz"))
    with tarfile.open(fileobj=target, mode=mode, format=source.choice((0, 1, 2))) as tar:  # type: ignore[call-overload]
        for _ in range(source.randrange(6)):
            info = tarfile.TarInfo(source.choice(_PATHS))
            info.type, info.linkname = source.choice(_KINDS), source.choice(_PATHS)
            info.size = source.choice((0, 1, 512, 5000, 2**40)) if source.random() < 0.1 else 10
            info.mode, info.pax_headers = source.randrange(0o10000), {"path": "x"} if source.random() < 0.1 else {}
            try:
                tar.addfile(info, io.BytesIO(bytes(10)) if info.size == 10 and info.isreg() else None)
            except (ValueError, OverflowError, OSError):
                continue  # this format cannot say it
    data = target.getvalue()
    return damaged(source, data) if source.random() < 0.5 else data


def fuzz_archives(count: int, seed: int = 0) -> list[str]:
    """Extract `count` archives; what was wrong."""
    source, wrong = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        packed, into = root / "m.tar.gz", root / "inner" / "model"
        for number in range(count):
            packed.write_bytes(hostile_archive(source))
            try:
                extract(packed, into)
            except ArchiveError:
                if into.exists():
                    wrong.append(f"archive {number} of seed {seed} is refused, and there")
            except BaseException as error:
                wrong.append(f"archive {number} of seed {seed}: {error!r}")
            wrong += [f"archive {number} of seed {seed} {what}" for what in _stray(root, into)]
            shutil.rmtree(into, ignore_errors=True)
    return wrong


def _stray(root: Path, into: Path) -> list[str]:
    """What is anywhere but below `into`, where the paths of the archives lead, or is neither a file nor a folder."""
    outside = [path for path in (*root.iterdir(), *into.parent.glob("*"), _ABSOLUTE) if path.exists()]
    found = [f"has written {path}" for path in outside if path not in (root / "m.tar.gz", into.parent, into)]
    inside = [path for path in into.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]
    return found + [f"has made {path}" for path in inside]
