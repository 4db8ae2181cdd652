"""Read and write files: TOML tables of this package, and files that come from elsewhere within bounds.

A file from elsewhere has to be a regular file, and no more bytes are read than a file of its kind has: a model's
directory may hold a FIFO, which a plain `open` waits for, or a link to a device without an end.
"""

import errno
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_SETTINGS_BYTES = 1 << 18
"""The most bytes of a file of settings. The longest known ones have some tens of kilobytes."""

MOST_JSON_BYTES = 1 << 23
"""The most bytes of a JSON file. The longest of a model lists thousands of quantised layers: some megabytes."""
MOST_TOKENIZER_BYTES = 1 << 26
"""The most bytes of a tokenizer file. Tokenizers of 250,000 tokens have 35 MB."""

_CHUNK_BYTES = 4 << 20
_KINDS: Mapping[str, Callable[[int], bool]] = {
    "a directory": stat.S_ISDIR,
    "a FIFO": stat.S_ISFIFO,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for what cannot be opened, and for what is no regular file."""
    # Without O_NONBLOCK, opening a FIFO waits until somebody writes.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = next((kind for kind, matches in _KINDS.items() if matches(mode)), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file with at most `most` bytes. Raises OSError, also for a longer file."""
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, the most of such a file", str(path))
    return content


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in chunks (constant memory). Raises OSError."""
    digest = hashlib.sha256()
    view = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(view):
            digest.update(view[:count])
    return digest.hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see complete or not at all, in place of one that is there. Raises OSError.

    That holds after a power cut too: the content is on the disk before it has the name.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_table(name: str, package: str = "djl_trtllm.config.compat") -> dict[str, Any]:
    """The content of the TOML or JSON file `name` beside the modules of `package`."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    return found
