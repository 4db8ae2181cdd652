"""The files of a hub repository: which are in the cache, and whether they have the hub's checksums."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.progress import ProgressMeter

_RECORD = ".djl-trtllm-checked.json"
_CHUNK = 4 << 20
_READERS = 8
_LOOK_EVERY_SECONDS = 1.0

Record = dict[str, tuple[int, str]]
"""Files already compared: path below the repository's folder -> time of its last change, checksum."""


class HubFile(NamedTuple):
    """A file in the hub's listing. `algorithm` is "SHA-256" (LFS), "git SHA-1", or empty if there is no checksum."""

    size: int
    algorithm: str
    checksum: str

    @classmethod
    def listed(cls, size: int | None, sha256: str | None, blob_id: str | None) -> HubFile:
        """`blob_id` is git's id of the content; for an LFS file, of its pointer."""
        if sha256:
            return cls(size or 0, "SHA-256", sha256)
        return cls(size or 0, "git SHA-1" if blob_id else "", blob_id or "")


class RepositoryFolder:
    """The folder of one repository in the hub's cache: `snapshots/COMMIT/...` are links to `blobs/CHECKSUM`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def missing_bytes(self, commit: str, files: Mapping[str, HubFile]) -> int:
        missing = 0
        for name, file in files.items():
            blob = self.path / "blobs" / file.checksum
            if not (self.path / "snapshots" / commit / name).exists() and not (file.checksum and blob.is_file()):
                missing += max(0, file.size - _allocated(blob.with_name(f"{blob.name}.incomplete")))
        return missing

    @contextmanager
    def watched(self, meter: ProgressMeter) -> Iterator[None]:
        """Count in `meter` what arrives in the folder while the block runs."""
        done = threading.Event()
        blobs = self.path / "blobs"

        def present() -> int:
            with suppress(OSError):
                return sum(_allocated(path) for path in blobs.iterdir())
            return 0

        def watch() -> None:
            seen = before
            last = False
            while not last:
                last = done.wait(_LOOK_EVERY_SECONDS)
                now = present()
                meter.add(now - seen)
                seen = now

        before = present()
        watching = threading.Thread(target=watch, name="hub-progress", daemon=True)
        watching.start()
        try:
            yield
        finally:
            done.set()
            watching.join()

    def check(self, where: str, snapshot: Path, files: Mapping[str, HubFile], progress: Callable[[str], None]) -> None:
        """Compare new files with the hub's checksums, and remove those that differ.

        Raises DownloadError with the files that differed.
        """
        if not os.access(self.path, os.W_OK):
            return  # nothing can have been downloaded into it, and results could not be recorded
        known = self._recorded()
        unchecked = [name for name, file in files.items() if not file.algorithm]
        if unchecked:
            progress(f"{where}: the hub has no checksum to compare for {', '.join(unchecked[:5])}")
        fresh = {}
        for name, file in files.items():
            key, record = self._state(snapshot / name, file)
            if file.algorithm and known.get(key) != record:
                fresh[name] = (key, record)
        if not fresh:
            return
        size = sum(files[name].size for name in fresh)
        with (
            ProgressMeter(f"comparing {where} with the hub's checksums", size, progress) as meter,
            ThreadPoolExecutor(_READERS) as readers,
        ):
            right = list(readers.map(lambda name: _is_right(snapshot / name, files[name], meter), fresh))
        self._record({key: record for (key, record), good in zip(fresh.values(), right, strict=True) if good})
        wrong = [name for name, good in zip(fresh, right, strict=True) if not good]
        if wrong:
            raise DownloadError(self._removed(snapshot, files, wrong))

    def _removed(self, snapshot: Path, files: Mapping[str, HubFile], wrong: list[str]) -> str:
        """Remove the files and return a description of them."""
        said = []
        for name in wrong:
            path, file = snapshot / name, files[name]
            size = path.stat().st_size if path.exists() else 0
            cut = file.size and size != file.size
            other = f"{size:,} bytes instead of {file.size:,}" if cut else f"a different {file.algorithm}"
            said.append(f"{name} arrived with {other} (the hub's {file.algorithm}: {file.checksum})")
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        what = "it was" if len(wrong) == 1 else "they were"
        return (
            f"{'; '.join(said)}; {what} removed, and the next start downloads again. If that does not help, something "
            "between this machine and the hub changes files: a proxy, or the mirror in HF_ENDPOINT"
        )

    def _state(self, path: Path, file: HubFile) -> tuple[str, tuple[int, str]]:
        try:
            real = path.resolve(strict=True)
            return os.path.relpath(real, self.path.resolve()), (real.stat().st_mtime_ns, file.checksum)
        except OSError:
            return str(path), (0, "")  # it was removed meanwhile

    def _recorded(self) -> Record:
        try:
            return msgspec.json.decode((self.path / _RECORD).read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return {}

    def _record(self, checked: Record) -> None:
        """Save the record. If another process writes it too, the lost entries are compared once more."""
        known = {key: value for key, value in self._recorded().items() if (self.path / key).is_file()}
        content = msgspec.json.encode(known | checked)
        with suppress(OSError):
            descriptor, name = tempfile.mkstemp(prefix=_RECORD, dir=self.path)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(name).replace(self.path / _RECORD)


def _is_right(path: Path, file: HubFile, meter: ProgressMeter) -> bool:
    digest = hashlib.sha256() if file.algorithm == "SHA-256" else hashlib.sha1(usedforsecurity=False)
    try:
        with path.open("rb", buffering=0) as content:
            size = os.fstat(content.fileno()).st_size
            if file.size and size != file.size:
                return False
            if file.algorithm != "SHA-256":
                digest.update(b"blob %d\0" % size)
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
                meter.add(len(chunk))
    except FileNotFoundError:
        return False  # another process found it wrong and removed it
    return digest.hexdigest() == file.checksum


def _allocated(path: Path) -> int:
    """Downloaded bytes of a file, by the disk's blocks: it may have holes. 0 if there is none."""
    try:
        state = path.stat()
    except OSError:
        return 0
    return min(state.st_size, state.st_blocks * 512)
