"""Download a model from S3 to a local directory: concurrent, verified, resumable, and always up to date."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec
from botocore.exceptions import ClientError
from filelock import FileLock

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import checksums, s3
from djl_trtllm.model.remote.parts import PartialFile
from djl_trtllm.model.remote.progress import ProgressMeter, acquire, format_bytes
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.remote.s3_body import Body
from djl_trtllm.model.remote.selection import needed

RECORD = ".djl-trtllm-download.json"
"""The last file of a complete download: what was downloaded from where."""

_CONNECTIONS = 64
_PART_BYTES = 16 << 20
_READ_BYTES = 256 << 10
"""What is read is written at once. 64 connections with 512 kB each are too much for caches, see performance.md."""
_FAILURES = 6
_FIRST_BACKOFF_SECONDS = 0.2
_LISTINGS = 3
_SPARE_BYTES = 256 << 20
_GONE = (404, 412, 416)


class RemoteObject(msgspec.Struct, frozen=True):
    """An object: `name` is its path in the directory; `etag` changes when its content does."""

    name: str
    key: str
    size: int
    etag: str


class _Record(msgspec.Struct, frozen=True):
    address: str
    objects: list[RemoteObject]


class _ChangedError(Exception):
    """An object was replaced during the download."""


def download(
    address: S3Address,
    folder: Path,
    progress: Callable[[str], None],
    *,
    select: Callable[[Iterable[str]], list[str]] = needed,
) -> Path:
    """Download the files under an address, or the one object it names, to a directory below `folder`.

    Lists the objects each time and downloads those that are new or changed. An interrupted download continues where it
    stopped. The directory is named after address and content, and appears when every file is complete and has S3's
    checksum. Other processes that want the same address wait.

    Raises DownloadError: no such object, no access, no disk space, or objects that keep failing.
    """

    def report(waited: float) -> None:
        progress(f"another process is downloading {address}, waiting for it ({waited:.0f} s)")

    home = folder / f"{address.key.rpartition('/')[2] or address.bucket}-{_short(str(address))}"
    for _ in range(_LISTINGS):
        objects = list_objects(address, select)
        final = home / _short("\n".join(f"{o.name} {o.size} {o.etag}" for o in objects))
        if (final / RECORD).is_file():
            return final
        try:
            home.mkdir(parents=True, exist_ok=True)
            with acquire(FileLock(home / ".lock"), report):
                if not (final / RECORD).is_file():
                    _Download(address, objects, final, progress).run()
                return final
        except _ChangedError as error:
            progress(f"{address}: {error} was replaced during the download; listing the objects again")
        except OSError as error:
            raise DownloadError(f"cannot download {address} to {home}: {error}") from error
    raise DownloadError(f"{address} changed during each of {_LISTINGS} downloads: wait until its upload is complete")


def list_objects(address: S3Address, select: Callable[[Iterable[str]], list[str]] = needed) -> list[RemoteObject]:
    """The objects of an address, sorted by name. Raises DownloadError, also if there are none."""
    below: dict[str, RemoteObject] = {}
    itself: RemoteObject | None = None
    with s3.download_errors(address):
        pages = s3.client().get_paginator("list_objects_v2").paginate(Bucket=address.bucket, Prefix=address.key)
        for entry in (entry for page in pages for entry in page.get("Contents", ())):
            key, size, etag = entry["Key"], int(entry["Size"]), entry["ETag"]
            if key == address.key:
                itself = RemoteObject(PurePosixPath(key).name, key, size, etag)
            elif not address.key or key.startswith(f"{address.key}/"):
                name = key.removeprefix(f"{address.key}/") if address.key else key
                below[name] = RemoteObject(name, key, size, etag)
    if not below and itself is not None:
        return [itself]
    for name in below:
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise DownloadError(f"{address}: the key {name!r} leads out of the prefix")
    objects = [below[name] for name in select(below)]
    if not objects:
        found = f"only {', '.join(sorted(below)[:5])}" if below else "nothing"
        raise DownloadError(
            f"{address}: there is {found} under this prefix; expected the files of a model (list it with "
            f"`aws s3 ls --recursive {address}/`)"
        )
    return objects


class _Arrival(NamedTuple):
    object: RemoteObject
    file: PartialFile


@dataclass
class _Download:
    """One download, run under the lock."""

    address: S3Address
    objects: list[RemoteObject]
    final: Path
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        self.partial = self.final.with_name(f".{self.final.name}.partial")
        self.stop = threading.Event()
        self.client = s3.client()
        self.meter: ProgressMeter
        self.unchecked: list[str] = []

    def run(self) -> None:
        """Download missing files, verify them, and rename the directory. Raises DownloadError and OSError."""
        self.partial.mkdir(parents=True, exist_ok=True)
        self._take_over_unchanged()
        arrivals = [
            _Arrival(object_, PartialFile(self.partial / object_.name, object_.size, object_.etag, _PART_BYTES))
            for object_ in self.objects
        ]
        missing = sum(arrival.file.missing_bytes for arrival in arrivals)
        self._check_room(sum(arrival.file.missing_blocks for arrival in arrivals))
        total = sum(object_.size for object_ in self.objects)
        kept = f", {format_bytes(total - missing)} of them here already" if missing < total else ""
        self.progress(f"downloading {self.address}: {len(arrivals)} files, {format_bytes(total)}{kept}")
        with ProgressMeter(f"downloading {self.address}", missing, self.progress) as self.meter:
            self._fetch_all(arrivals)
        if self.unchecked:
            self.progress(f"{self.address}: S3 has no checksum to compare for {', '.join(self.unchecked[:5])}")
        record = _Record(str(self.address), self.objects)
        (self.partial / RECORD).write_bytes(msgspec.json.encode(record))
        self.partial.rename(self.final)
        for other in self.final.parent.iterdir():
            if other.is_dir() and other != self.final:
                shutil.rmtree(other, ignore_errors=True)

    def _take_over_unchanged(self) -> None:
        """Link the files of an earlier version whose objects have not changed."""
        for other in self.final.parent.iterdir():
            if not (other / RECORD).is_file():
                continue
            earlier = set(msgspec.json.decode((other / RECORD).read_bytes(), type=_Record).objects)
            for object_ in self.objects:
                target = self.partial / object_.name
                if object_ in earlier and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    # If links are not supported, the file is downloaded again.
                    with suppress(OSError):
                        os.link(other / object_.name, target)

    def _check_room(self, missing: int) -> None:
        free = shutil.disk_usage(self.partial).free
        if missing + _SPARE_BYTES > free:
            raise DownloadError(
                f"{self.address} needs {format_bytes(missing)} more on the disk of {self.partial.parent}, and "
                f"{format_bytes(free)} are free ({format_bytes(_SPARE_BYTES)} stay free): free some space, or set "
                "DJL_CACHE_DIR to a larger disk"
            )

    def _fetch_all(self, arrivals: list[_Arrival]) -> None:
        tasks: deque[Callable[[], None]] = deque()
        for arrival in sorted(arrivals, key=lambda arrival: arrival.object.size, reverse=True):
            missing = arrival.file.missing()
            tasks += [partial(self._fetch_part, arrival, index) for index in missing]
            # The thread that downloads the last missing part completes the file.
            if not missing and not arrival.file.complete:
                tasks.append(partial(self._complete, arrival))
        try:
            self._run_all(tasks)
        finally:
            for arrival in arrivals:
                arrival.file.close()

    def _run_all(self, tasks: deque[Callable[[], None]]) -> None:
        """Download on daemon threads, which do not delay the end of the process as a ThreadPoolExecutor's would."""
        failures: list[BaseException] = []

        def work() -> None:
            while not self.stop.is_set():
                try:
                    task = tasks.popleft()
                except IndexError:
                    return
                try:
                    task()
                except BaseException as error:
                    failures.append(error)
                    self.stop.set()

        threads = [threading.Thread(target=work, name="s3", daemon=True) for _ in range(min(_CONNECTIONS, len(tasks)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _fetch_part(self, arrival: _Arrival, index: int) -> None:
        file = arrival.file
        at, end = file.part(index)
        crc = failures = 0
        buffer = memoryview(bytearray(min(_READ_BYTES, end - at)))
        while at < end and not self.stop.is_set():
            before = at
            problem: object = "the object is shorter than in the listing"
            try:
                with Body(self._open(arrival.object, at, end)) as body:
                    while not self.stop.is_set() and (count := body.readinto(buffer[: end - at])):
                        file.write(at, buffer[:count])
                        crc = checksums.crc64(buffer[:count], crc)
                        at += count
                        self.meter.add(count)
            except ConnectionError as error:
                problem = error
            if at < end and not self.stop.is_set():
                failures = 1 if at > before else failures + 1
                self._back_off(arrival.object, at, failures, problem)
        if at == end and file.note(index, crc):
            self._complete(arrival)

    def _open(self, object_: RemoteObject, at: int, end: int) -> Any:
        wanted = f"bytes={at}-{end - 1}"
        with s3.download_errors(f"s3://{self.address.bucket}/{object_.key}"):
            try:
                answer = self.client.get_object(
                    Bucket=self.address.bucket, Key=object_.key, Range=wanted, IfMatch=object_.etag
                )
            except ClientError as error:
                if s3.status(error) in _GONE:
                    raise _ChangedError(object_.name) from error
                raise
        return answer["Body"]

    def _back_off(self, object_: RemoteObject, at: int, failures: int, problem: object) -> None:
        if failures == _FAILURES:
            raise DownloadError(
                f"{self.address}: {object_.name} broke off at byte {at:,} of {object_.size:,}, {failures} times in a "
                f"row ({problem}); what has arrived is kept, and the next start continues from there"
            )
        self.stop.wait(_FIRST_BACKOFF_SECONDS * 2 ** (failures - 1))

    def _complete(self, arrival: _Arrival) -> None:
        """Compare the complete file with S3's checksum and give it its name."""
        object_, file = arrival.object, arrival.file
        with s3.download_errors(f"s3://{self.address.bucket}/{object_.key}"):
            head = self._head(object_, ChecksumMode="ENABLED")
            if head["ETag"] != object_.etag:
                raise _ChangedError(object_.name)
            claim = checksums.claim_of(head, lambda: int(self._head(object_, PartNumber=1)["ContentLength"]))
        if claim is None:
            self.unchecked.append(object_.name)
        elif not self._is_right(file, claim):
            file.discard()
            raise DownloadError(
                f"{self.address}: {object_.name} arrived with a different {claim.algorithm} than S3 has for it "
                f"({claim.value}); it was removed, and the next start downloads it again"
            )
        file.finish()

    def _head(self, object_: RemoteObject, **arguments: Any) -> Any:
        return self.client.head_object(Bucket=self.address.bucket, Key=object_.key, **arguments)

    def _is_right(self, file: PartialFile, claim: checksums.Claim) -> bool:
        if claim.algorithm == "CRC64NVME" and not claim.part_size:
            return checksums.joined_crc64(file.crcs()) == claim.value
        return checksums.matches(claim, file.arriving)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
