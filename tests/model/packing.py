"""Archives for tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

FILES = {"config.json": b"{}", "serving.properties": b"engine=Python\n", "weights/part": b"\x00\x01" * 5000}

Member = tuple[tarfile.TarInfo, bytes]


def member(
    name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> Member:
    """A member; only regular files have content."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.mode = mode
    content = content if kind == tarfile.REGTYPE else b""
    info.size = len(content)
    return info, content


def with_records(name: str, **records: str) -> Member:
    """A member with attribute records, which may say anything."""
    info, content = member(name)
    info.pax_headers = records
    return info, content


def pack(path: Path, *members: Member, mode: str = "w:gz") -> Path:
    """Write an archive of these members."""
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def pack_files(path: Path, prefix: str = "", mode: str = "w:gz") -> Path:
    """Write an archive of `FILES`."""
    return pack(path, *(member(prefix + name, content) for name, content in FILES.items()), mode=mode)


def contents(directory: Path) -> dict[str, bytes]:
    """The files below a directory."""
    return {
        str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()
    }
