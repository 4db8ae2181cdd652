"""Download a model from S3 to a local directory: concurrent, verified, resumable, and always up to date."""

import base64
import hashlib
import os
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec
from awscrt import checksums as crt
from botocore.exceptions import ClientError
from filelock import FileLock

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import s3
from djl_trtllm.model.remote.fetch import needed
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.work_directory import shortage
from djl_trtllm.progress import ProgressMeter, acquire, format_bytes


@contextmanager
def reading(body: Any) -> Iterator[Callable[[memoryview], int]]:
    """Yield a function that fills a buffer from botocore's body of an answer, or its beginning where the body ends.

    It raises ConnectionError. After the block the connection is there for other requests. The `readinto` of botocore
    and of urllib3 allocate memory for each read and copy it. This calls the one of http.client's response below them,
    which botocore reaches for in the same way, to set a timeout.
    """
    answer = body.__enter__()
    source = answer._fp

    def readinto(buffer: memoryview) -> int:
        try:
            return int(source.readinto(buffer))
        except (OSError, HTTPException) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    try:
        yield readinto
    finally:
        if not source.isclosed():
            # The rest of the body is still to come: another request on this connection would read it as its answer.
            answer.close()
        answer.release_conn()


class RemoteObject(msgspec.Struct, frozen=True):
    """An object: `name` is its path in the directory; `etag` changes when its content does."""

    name: str
    key: str
    size: int
    etag: str


# -- files in parts ----------------------------------------------------------------------------------------------------

_SUFFIX = ".arriving"
_JOURNAL = ".parts"


class PartialFile:
    """`path`, the content of an object, from parts of `part_size` bytes.

    A journal beside the partial file lists the complete parts with the CRC-64/NVME of each. If the object has changed,
    the parts are discarded. Methods are thread-safe. All may raise OSError.
    """

    def __init__(self, path: Path, object_: RemoteObject, part_size: int) -> None:
        self.path = path
        self.object = object_
        self.size = object_.size
        self.arriving = path.with_name(path.name + _SUFFIX)
        self._journal = path.with_name(path.name + _JOURNAL)
        self._part_size = part_size
        self._head = [object_.size, object_.etag, part_size]
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._crcs: dict[int, int] = {}
        if not self.complete:
            self._resume()
            if not self.size:
                # An empty file has no parts.
                self._open()

    @property
    def complete(self) -> bool:
        """Return whether the file is complete under its final name."""
        return self.path.is_file()

    @property
    def parts(self) -> int:
        return -(-self.size // self._part_size)

    @property
    def missing_bytes(self) -> int:
        return sum(end - start for start, end in map(self.part, self.missing()))

    @property
    def missing_blocks(self) -> int:
        """Bytes of disk space that are still needed."""
        if self.complete:
            return 0
        with suppress(FileNotFoundError):
            return max(0, self.size - self.arriving.stat().st_blocks * 512)
        return self.size

    def missing(self) -> list[int]:
        return [] if self.complete else [index for index in range(self.parts) if index not in self._crcs]

    def part(self, index: int) -> tuple[int, int]:
        start = index * self._part_size
        return start, min(self.size, start + self._part_size)

    def write(self, at: int, data: bytes | memoryview) -> None:
        descriptor = self._open()
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, at)
            view = view[written:]
            at += written

    def note(self, index: int, crc: int) -> bool:
        """Record a complete part; True if it was the last missing one."""
        with self._lock:
            with self._journal.open("ab") as journal:
                journal.write(msgspec.json.encode([index, crc]) + b"\n")
            self._crcs[index] = crc
            return len(self._crcs) == self.parts

    def crcs(self) -> Iterator[tuple[int, int]]:
        """CRC-64/NVME and length of each part, in order; all parts must be complete."""
        for index in range(self.parts):
            start, end = self.part(index)
            yield self._crcs[index], end - start

    def finish(self) -> None:
        """Rename the file to its final name. All parts must be complete."""
        self.close()
        self.arriving.rename(self.path)
        self._journal.unlink(missing_ok=True)

    def discard(self) -> None:
        self.close()
        self.arriving.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)
        self._crcs.clear()

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int:
        with self._lock:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.arriving, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                if self.size:
                    # Reserve all space now, so that a full disk is reported at once.
                    os.posix_fallocate(self._descriptor, 0, self.size)
                if not self._journal.exists():
                    self._journal.write_bytes(msgspec.json.encode(self._head) + b"\n")
            return self._descriptor

    def _resume(self) -> None:
        """Read the journal; remove it if it does not match. An incomplete last line is ignored."""
        try:
            head, *lines = self._journal.read_bytes().split(b"\n")
            if msgspec.json.decode(head) != self._head or not self.arriving.is_file():
                raise ValueError
            for line in lines[:-1]:
                index, crc = msgspec.json.decode(line, type=tuple[int, int])
                self._crcs[index] = crc
        except FileNotFoundError:
            self.arriving.unlink(missing_ok=True)
        except (ValueError, msgspec.DecodeError):
            self.discard()


# -- checksums ---------------------------------------------------------------------------------------------------------

CHUNK_BYTES = 4 << 20
_ENCRYPTED = ("aws:kms", "aws:kms:dsse")


class Claim(NamedTuple):
    """A checksum: its algorithm, its value as S3 writes it, and the part size it is computed over (0: the whole)."""

    algorithm: str
    value: str
    part_size: int = 0


def claim_of(head: Mapping[str, Any], part_size: Callable[[], int]) -> Claim | None:
    """The best checksum in the response to a HEAD request (with ChecksumMode=ENABLED); None if there is none.

    A checksum over parts needs the part size, which costs a request; `part_size` is called only then. The ETag is an
    MD5 unless the object is encrypted with a customer's key.
    (https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html)
    """
    for algorithm in ("CRC64NVME", "CRC32C", "CRC32", "SHA256", "SHA1"):
        value = str(head.get(f"Checksum{algorithm}", ""))
        if value:
            return Claim(algorithm, value, part_size() if "-" in value else 0)
    encrypted = head.get("ServerSideEncryption") in _ENCRYPTED or "SSECustomerAlgorithm" in head
    etag = str(head.get("ETag", "")).strip('"')
    if encrypted or not etag:
        return None
    return Claim("MD5", etag, part_size() if "-" in etag else 0)


def matches(claim: Claim, path: Path) -> bool:
    """Return whether the file has that checksum; reads all of it, in chunks. Raises OSError."""
    if not claim.part_size:
        return _written(claim.algorithm, _digest(claim.algorithm, _chunks(path))) == claim.value
    size = path.stat().st_size
    starts = range(0, max(size, 1), claim.part_size)
    digests = [_digest(claim.algorithm, _chunks(path, start, claim.part_size)) for start in starts]
    whole = _digest(claim.algorithm, iter([b"".join(digests)]))
    return f"{_written(claim.algorithm, whole)}-{len(digests)}" == claim.value


def crc64(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-64/NVME of `data`, continuing `before`."""
    return int(crt.crc64nvme(data, before))


def joined_crc64(pieces: Iterator[tuple[int, int]]) -> str:
    """The CRC-64/NVME of consecutive pieces, each given as (checksum, length), as S3 writes it."""
    whole = 0
    for value, length in pieces:
        whole = int(crt.combine_crc64nvme(whole, value, length))
    return base64.b64encode(whole.to_bytes(8, "big")).decode()


def _written(algorithm: str, digest: bytes) -> str:
    return digest.hex() if algorithm == "MD5" else base64.b64encode(digest).decode()


def _digest(algorithm: str, chunks: Iterator[bytes]) -> bytes:
    if algorithm in ("MD5", "SHA1", "SHA256"):
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for chunk in chunks:
            digest.update(chunk)
        return digest.digest()
    step = {"CRC64NVME": crt.crc64nvme, "CRC32C": crt.crc32c, "CRC32": zlib.crc32}[algorithm]
    value = 0
    for chunk in chunks:
        value = step(chunk, value)
    return value.to_bytes(8 if algorithm == "CRC64NVME" else 4, "big")


def _chunks(path: Path, start: int = 0, length: int | None = None) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = length
        while left is None or left > 0:
            chunk = file.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
            if not chunk:
                return
            yield chunk
            if left is not None:
                left -= len(chunk)


RECORD = ".djl-trtllm-download.json"
"""The last file of a complete download: what was downloaded from where."""

PART_BYTES = 16 << 20
"""The most bytes that one request fetches."""
_CONNECTIONS = 64
_READ_BYTES = 256 << 10
"""Each read is written at once. 64 connections with 512 kB each are too much for caches, see performance.md."""
_FAILURES = 6
_LISTINGS = 3
_GONE = (404, 412, 416)


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
    patience: float = s3.PATIENCE_SECONDS,
) -> Path:
    """Download the files under an address, or the one object it names, to a directory below `folder`.

    Lists the objects each time and downloads those that are new or changed. An interrupted download continues where it
    stopped. The directory is named after address and content, and appears when every file is complete and has S3's
    checksum. Other processes that want the same address wait. A store that is asked too often is asked again for
    `patience` seconds, and so is one that breaks off, each time after a pause that is twice as long.

    Raises DownloadError: no such object, no access, no disk space, or objects that keep failing.
    """

    def report(waited: float) -> None:
        progress(f"another process is downloading {address}, waiting for it ({waited:.0f} s)")

    home = folder / f"{address.key.rpartition('/')[2] or address.bucket}-{_short(str(address))}"
    for _ in range(_LISTINGS):
        objects = list_objects(address, select, patience=patience)
        final = home / _short("\n".join(f"{o.name} {o.size} {o.etag}" for o in objects))
        if (final / RECORD).is_file():
            return final
        try:
            home.mkdir(parents=True, exist_ok=True)
            with acquire(FileLock(home / ".lock"), report):
                if not (final / RECORD).is_file():
                    until = time.monotonic() + patience
                    _Download(address, objects, final, progress, until).run()
                return final
        except _ChangedError as error:
            progress(f"{address}: {error} was replaced during the download; listing the objects again")
        except OSError as error:
            raise DownloadError(f"cannot download {address} to {home}: {error}") from error
    raise DownloadError(f"{address} changed during each of {_LISTINGS} downloads: wait until its upload is complete")


def list_objects(
    address: S3Address,
    select: Callable[[Iterable[str]], list[str]] = needed,
    *,
    patience: float = s3.PATIENCE_SECONDS,
) -> list[RemoteObject]:
    """The objects below an address, sorted by name, or the one that it names.

    `patience` is that of `download`. Raises DownloadError, also if there are none.
    """
    prefix = address.below("")
    below = {
        name: RemoteObject(name, entry["Key"], int(entry["Size"]), entry["ETag"])
        for entry in s3.listed(address, patience)
        if (name := entry["Key"].removeprefix(prefix))
    }
    if not below and (itself := _object(address, patience)) is not None:
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


def _object(address: S3Address, patience: float) -> RemoteObject | None:
    """The object with exactly this key; None without one, or if there is no permission to ask for it."""
    if not address.key:
        return None
    ask = partial(s3.client().head_object, Bucket=address.bucket, Key=address.key)
    with s3.download_errors(address):
        try:
            head = s3.patiently(ask, time.monotonic() + patience)
        except ClientError as error:
            if s3.status(error) in (403, 404):
                return None
            raise
    return RemoteObject(PurePosixPath(address.key).name, address.key, int(head["ContentLength"]), head["ETag"])


@dataclass
class _Download:
    """One download, run under the lock."""

    address: S3Address
    objects: list[RemoteObject]
    final: Path
    progress: Callable[[str], None]
    until: float
    """The time (`time.monotonic`) at which to give up a store that is asked too often."""

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
        files = [PartialFile(self.partial / object_.name, object_, PART_BYTES) for object_ in self.objects]
        missing = sum(file.missing_bytes for file in files)
        if lack := shortage(self.partial.parent, sum(file.missing_blocks for file in files)):
            raise DownloadError(f"{self.address}: {lack}: free some space, or set DJL_CACHE_DIR to a larger disk")
        total = sum(object_.size for object_ in self.objects)
        kept = f", {format_bytes(total - missing)} of them here already" if missing < total else ""
        self.progress(f"downloading {self.address}: {len(files)} files, {format_bytes(total)}{kept}")
        with ProgressMeter(f"downloading {self.address}", missing, self.progress) as self.meter:
            self._fetch_all(files)
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
            try:
                earlier = msgspec.json.decode((other / RECORD).read_bytes(), type=_Record)
            except (OSError, msgspec.DecodeError):
                continue  # a download that a killed process left, perhaps with half a record
            for object_ in set(self.objects).intersection(earlier.objects):
                target = self.partial / object_.name
                if not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    # If links are not supported, the file is downloaded again.
                    with suppress(OSError):
                        os.link(other / object_.name, target)

    def _fetch_all(self, files: list[PartialFile]) -> None:
        tasks: deque[Callable[[], None]] = deque()
        for file in sorted(files, key=lambda file: file.size, reverse=True):
            missing = file.missing()
            tasks += [partial(self._fetch_part, file, index) for index in missing]
            # The thread that downloads the last missing part completes the file.
            if not missing and not file.complete:
                tasks.append(partial(self._complete, file))
        try:
            self._run_all(tasks)
        finally:
            for file in files:
                file.close()

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

    def _fetch_part(self, file: PartialFile, index: int) -> None:
        at, end = file.part(index)
        crc = failures = 0
        buffer = memoryview(bytearray(min(_READ_BYTES, end - at)))
        while at < end and not self.stop.is_set():
            before = at
            problem: object = "the object is shorter than in the listing"
            try:
                with reading(self._open(file.object, at, end)) as readinto:
                    while not self.stop.is_set() and (count := readinto(buffer[: end - at])):
                        file.write(at, buffer[:count])
                        crc = crc64(buffer[:count], crc)
                        at += count
                        self.meter.add(count)
            except ConnectionError as error:
                problem = error
            if at < end and not self.stop.is_set():
                failures = 1 if at > before else failures + 1
                self._back_off(file.object, at, failures, problem)
        if at == end and file.note(index, crc):
            self._complete(file)

    def _open(self, object_: RemoteObject, at: int, end: int) -> Any:
        wanted = f"bytes={at}-{end - 1}"
        with s3.download_errors(f"s3://{self.address.bucket}/{object_.key}"):
            try:
                answer = self._patiently(self.client.get_object, Key=object_.key, Range=wanted, IfMatch=object_.etag)
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
        self.stop.wait(s3.FIRST_PAUSE_SECONDS * 2 ** (failures - 1))

    def _complete(self, file: PartialFile) -> None:
        """Compare the complete file with S3's checksum and give it its name."""
        object_ = file.object
        with s3.download_errors(f"s3://{self.address.bucket}/{object_.key}"):
            head = self._head(object_, ChecksumMode="ENABLED")
            if head["ETag"] != object_.etag:
                raise _ChangedError(object_.name)
            claim = claim_of(head, lambda: int(self._head(object_, PartNumber=1)["ContentLength"]))
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
        return self._patiently(self.client.head_object, Key=object_.key, **arguments)

    def _patiently(self, call: Callable[..., Any], **arguments: Any) -> Any:
        ask = partial(call, Bucket=self.address.bucket, **arguments)
        return s3.patiently(ask, self.until, self.stop.wait)

    def _is_right(self, file: PartialFile, claim: Claim) -> bool:
        if claim.algorithm == "CRC64NVME" and not claim.part_size:
            return joined_crc64(file.crcs()) == claim.value
        return matches(claim, file.arriving)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
