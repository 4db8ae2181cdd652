"""Directories that a process works in. The system says whether it still does: a lock ends with its process."""

import fcntl
import itertools
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from djl_trtllm.files import write_whole
from djl_trtllm.progress import format_bytes

logger = logging.getLogger(__name__)

TEMPORARY_PREFIX = "djl-trtllm-work-"
ENGINE_PREFIX = "djl-trtllm-"
"""The beginning of the names of engine processes' folders; twelve hexadecimal digits follow."""
_FOLDER = re.compile(rf"{TEMPORARY_PREFIX}.+|{ENGINE_PREFIX}[0-9a-f]{{12}}")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has it
_SETTLED_SECONDS = 60.0
"""The age in seconds from which an unlocked folder counts as abandoned: a new one may not be locked yet."""


SPARE_BYTES = 256 << 20
"""Bytes that stay free on a disk."""


def shortage(folder: Path, needed: int) -> str | None:
    """The message that a folder's disk has no room for `needed` bytes beside `SPARE_BYTES`; None if it has room."""
    free = shutil.disk_usage(next(each for each in (folder, *folder.absolute().parents) if each.exists())).free
    if not needed or needed + SPARE_BYTES <= free:
        return None
    return (
        f"{format_bytes(needed)} more are needed on the disk of {folder}, and {format_bytes(free)} are free "
        f"({format_bytes(SPARE_BYTES)} stay free)"
    )


@contextmanager
def temporary_directory() -> Iterator[str]:
    """An empty directory in the system's folder for temporary files, removed after the block."""
    with (
        tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, ignore_cleanup_errors=True) as path,
        marked(Path(path)),
    ):
        yield path


@contextmanager
def marked(path: Path) -> Iterator[None]:
    """Lock a directory or file while the block runs. The system unlocks it when the process ends, however it ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def link_with_changes(directory: Path, into: Path, changed: Mapping[str, str]) -> None:
    """Fill `into` with links to the files of `directory`; the `changed` files get these texts instead.

    It may be there already, and be in use. Raises OSError.
    """
    into.mkdir(parents=True, exist_ok=True)
    for path in into.iterdir():
        if not path.exists():  # the link's file is gone
            path.unlink(missing_ok=True)
    for path in directory.iterdir():
        if path.name not in changed:
            with suppress(FileExistsError):
                (into / path.name).symlink_to(path.absolute())
    for name, text in changed.items():
        write_whole(into / name, text.encode())


def folder_in_memory(folder: Path) -> Path:
    """Return the place of shared memory that belongs to the temporary folder of an engine process."""
    return _SHARED_MEMORY / folder.name


def abandoned_temporary_directories() -> Iterator[Path]:
    """Yield the temporary directories that processes left when they were killed."""
    folders = (Path(tempfile.gettempdir()), _SHARED_MEMORY)
    for path in itertools.chain.from_iterable(folder.glob(f"{ENGINE_PREFIX}*") for folder in folders):
        with suppress(OSError):
            status = path.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            settled = time.time() - status.st_mtime > _SETTLED_SECONDS
            if ours and settled and _FOLDER.fullmatch(path.name) and is_abandoned(path):
                yield path


def sweep_temporary_directories() -> int:
    """Remove the temporary directories of killed processes, and return their number."""
    found = list(abandoned_temporary_directories())
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    if found:
        logger.debug("removed %d temporary folders of processes that were killed: %s, ...", len(found), found[0])
    return len(found)


def is_abandoned(path: Path) -> bool:
    """Return whether no process has `marked` the directory or file; False if that is unknown."""
    with suppress(OSError), exclusively(path) as free:
        return free
    return False


@contextmanager
def exclusively(path: Path, flags: int = os.O_RDONLY) -> Iterator[bool]:
    """Whether no process has `marked` the directory or file; if so, none can while the block runs.

    `flags` are those of `os.open`. Raises OSError.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            free = False
        yield free
    finally:
        os.close(descriptor)


# -- directories that appear whole -------------------------------------------------------------------------------------

UNFINISHED = ".partial"
_UNFINISHED = re.compile(rf"\.+(?P<out>.+?)(?:\.\d+\.[0-9a-f]+{re.escape(UNFINISHED)})+(?:\.log)?")


def unfinished_name(out: Path) -> Path:
    """A new path for what becomes `out`: `.OUT.PID.RANDOM.partial` beside it."""
    return out.with_name(f".{out.name}.{os.getpid()}.{secrets.token_hex(4)}{UNFINISHED}")


def unfinished(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the directories that builders write, or left when they were killed, with the results' names."""
    for path in folder.glob(f".*{UNFINISHED}*"):
        if found := _UNFINISHED.fullmatch(path.name):
            yield found["out"], path


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield an empty directory beside `out`, which is renamed to it after the block, or removed if the block raises.

    A process killed inside the block leaves only the hidden directory; `sweep(out)` removes it. Raises OSError, also
    if `out` exists by then and is not empty.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = unfinished_name(out)
    partial.mkdir()
    try:
        with marked(partial):
            yield partial
            partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sweep(out: Path) -> list[Path]:
    """Remove what killed builders of `out` left behind, and return its directories.

    Nothing is removed while a process of this machine builds `out`. Where other machines may build it too, call this
    only while `out` is locked for builders: a mark on a directory of a network file system is unknown to the others.
    """
    found = sorted(path for name, path in unfinished(out.parent) if name == out.name.lstrip("."))
    left = [path for path in found if path.suffix != ".log"]
    if not all(map(is_abandoned, left)):
        return []
    for path in found:
        if path in left:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return left
