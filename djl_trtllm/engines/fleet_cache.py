"""An engine cache in S3: a fleet of machines compiles an engine once.

The machine that compiles holds a lease, and a dead machine loses it.
"""

import json
import logging
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
from botocore.exceptions import ClientError

from djl_trtllm.engines.cache import MANIFEST_FILE, Manifest
from djl_trtllm.engines.compiler import DISK
from djl_trtllm.errors import BuildError, DownloadError, EngineError, EngineMismatchError
from djl_trtllm.model.remote import s3
from djl_trtllm.model.remote.fetch import upload
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.remote.s3_download import RECORD, download
from djl_trtllm.progress import format_bytes

log = logging.getLogger(__name__)


def _ask(
    method: str,
    address: S3Address,
    unless: tuple[int, ...],
    *,
    patience: float = s3.PATIENCE_SECONDS,
    **arguments: Any,
) -> Any | None:
    """The store's answer to a request for one object; None where its status is in `unless`. Raises DownloadError.

    A fleet that starts asks for the same objects at once, so a store that is asked too often is asked again, for
    `patience` seconds.
    """
    with s3.download_errors(address):
        ask = partial(getattr(s3.client(), method), Bucket=address.bucket, Key=address.key, **arguments)
        try:
            return s3.patiently(ask, time.monotonic() + patience)
        except ClientError as error:
            if s3.status(error) in unless and error.response["Error"]["Code"] != "NoSuchBucket":
                return None
            raise


_ABSENT = (404,)
_OVERTAKEN = (404, 409, 412)
"""Statuses of a conditional request: another machine has removed, is writing or has replaced the object; or this one
has, and the answer to an earlier attempt of the same request was lost."""


def _age(answer: Any) -> float:
    """Seconds since an object was written, by the store's clock."""
    now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    return float((now - answer["LastModified"]).total_seconds())


class Lease:
    """The right to do one thing, held by renewing an object in the bucket.

    The object is written only if it does not exist, or over one that was not renewed for `seconds`; S3's conditional
    writes decide between competitors (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html).
    Only the store's clock is used for ages. All methods raise DownloadError if the store fails.
    """

    def __init__(self, address: S3Address, seconds: float) -> None:
        self._address = address
        self._seconds = seconds
        self._patience = s3.PATIENCE_SECONDS
        self._owner = f"{socket.gethostname()} {secrets.token_hex(8)}"
        self._etag: str

    def acquire(self) -> bool:
        """Try to acquire it; False while another machine holds it."""
        if self._write(IfNoneMatch="*"):
            return True
        held = self._ask("get_object", _ABSENT)
        if held is None:  # released just now
            return self._write(IfNoneMatch="*")
        return self._is_own(held) or (_age(held) > self._seconds and self._write(IfMatch=held["ETag"]))

    def is_held(self) -> bool:
        """Whether any machine holds it."""
        held = self._ask("head_object", _ABSENT)
        return held is not None and _age(held) <= self._seconds

    @contextmanager
    def held(self) -> Iterator[None]:
        """Renew it while the block runs, then release it."""
        # It is renewed again after this time, and expires by itself: the machine that has its engine does not wait.
        self._patience = self._seconds / 4
        done = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(done,), name="lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            done.set()
            renewing.join()
            try:
                self._release()
            except DownloadError as error:
                # It expires by itself.
                log.info("the lease was not released: %s", error)

    def _release(self) -> None:
        # The last renewal may have been done although its answer was lost: the ETag is then another one.
        if self._ask("delete_object", _OVERTAKEN, IfMatch=self._etag) is None and self._is_still_own():
            self._ask("delete_object", _OVERTAKEN, IfMatch=self._etag)

    def _renew(self, done: threading.Event) -> None:
        while not done.wait(self._seconds / 4):
            try:
                renewed = self._write(IfMatch=self._etag) or self._is_still_own()
            except DownloadError as error:
                log.warning("cannot renew the lease: %s", error)
                continue
            if not renewed:
                log.warning("another machine took over the lease %s", self._address)
                return

    def _write(self, **condition: Any) -> bool:
        # New content at each renewal changes the ETag.
        content = f"{self._owner} {secrets.token_hex(4)}".encode()
        answer = self._ask("put_object", _OVERTAKEN, Body=content, **condition)
        if answer is not None:
            self._etag = answer["ETag"]
        return answer is not None

    def _is_still_own(self) -> bool:
        found = self._ask("get_object", _ABSENT)
        return found is not None and self._is_own(found)

    def _ask(self, method: str, unless: tuple[int, ...], **arguments: Any) -> Any | None:
        return _ask(method, self._address, unless, patience=self._patience, **arguments)

    def _is_own(self, found: Any) -> bool:
        """Whether this machine has written the object: the refused request may repeat one that was done."""
        own = _content(found, self._address).startswith(self._owner.encode())
        if own:
            self._etag = found["ETag"]
        return own


def _content(answer: Any, address: S3Address) -> bytes:
    with s3.download_errors(address):
        return bytes(answer["Body"].read())


_LEASE_SECONDS = 60.0
_WAIT_SECONDS = 3600.0
_POLL_SECONDS = 3.0
_REPORT_EVERY_SECONDS = 15.0
_FAILED_SECONDS = 600.0
"""Seconds for which no other machine tries a compile that failed on one."""
_MOST_REASON = 4000
_ENTRY, _LEASE, _FAILURE = ".json", ".lease", ".failed"
_NAME = re.compile(r"([a-z][a-z0-9_-]*-[0-9a-f]{32})(\.json|\.lease|\.failed|/.+)")
"""The names of the cache's objects, below its address: the key (`cache.cache_key`), and the kind of the object."""


class _Entry(msgspec.Struct, frozen=True):
    """The object `KEY.json`; its presence says that `folder` is complete."""

    folder: str
    manifest: dict[str, Any]


class _Failure(msgspec.Struct, frozen=True):
    """The object `KEY.failed`: the machine on which compiling failed, and why."""

    machine: str
    reason: str


@dataclass
class FleetCache:
    """Engines by key under an address in S3.

    An engine is in a folder of its own, `KEY/RANDOM/`. The object `KEY.json` names the folder that is valid; it is
    written last, and only if it does not exist. The builder holds the lease `KEY.lease`. A compile that failed is
    `KEY.failed`: for ten minutes the other machines fail with its reason, and do not compile one after the other. If S3
    cannot be used, the engine is built without it and `progress` gets the reason.
    """

    address: S3Address
    lease_seconds: float = _LEASE_SECONDS
    wait_seconds: float = _WAIT_SECONDS

    def provide(self, key: str, out: Path, build: Callable[[Path], None], progress: Callable[[str], None]) -> None:
        """Create the directory `out`: fetch it, or build it with `build(out)` and upload it for the others.

        Waits while another machine builds it, at most `wait_seconds`. Raises what `build` raises, and EngineError if it
        failed on another machine.
        """
        try:
            fetched = self._fetch_or_wait(key, out, build, progress)
        except DownloadError as error:
            progress(f"the engine cache {self.address} cannot be used: {error}; compiling here")
            fetched = False
        if not fetched:
            build(out)

    def _fetch_or_wait(
        self, key: str, out: Path, build: Callable[[Path], None], progress: Callable[[str], None]
    ) -> bool:
        """Fetch the engine, or build it where no other machine does. Returns False if the wait was too long."""
        started = time.monotonic()
        reported = -_REPORT_EVERY_SECONDS
        lease = self._lease(key)
        while True:
            if self._fetch(key, out, progress):
                return True
            if lease.acquire():
                with lease.held():
                    # It may have become complete, or failed, between the check and the lease.
                    if not self._fetch(key, out, progress):
                        self._build(key, out, build)
                        self._upload(key, out, progress)
                return True
            waited = time.monotonic() - started
            if waited > self.wait_seconds:
                progress(f"another machine has been compiling {key} for {waited:.0f} s; compiling here as well")
                return False
            if waited - reported >= _REPORT_EVERY_SECONDS:
                progress(
                    f"another machine is compiling this engine for {self.address}, waiting for it ({waited:.0f} s)"
                )
                reported = waited
            time.sleep(min(_POLL_SECONDS, self.lease_seconds / 4))

    def _build(self, key: str, out: Path, build: Callable[[Path], None]) -> None:
        try:
            build(out)
        except BuildError as error:
            if error.cause != DISK.name:  # a full disk is this machine's own
                failure = _Failure(socket.gethostname(), str(error)[:_MOST_REASON])
                try:
                    _ask("put_object", self._at(key + _FAILURE), (), Body=msgspec.json.encode(failure))
                except DownloadError as unwritten:
                    log.info("other machines will compile this engine too: %s", unwritten)
            raise

    def _fetch(self, key: str, out: Path, progress: Callable[[str], None]) -> bool:
        """Fetch the engine; False if there is none. Raises EngineError if compiling it failed lately."""
        found = self._entry(key)
        if found is None:
            self._raise_failure(key)
            return False
        entry, etag = found
        home = out.with_name(f".{out.name}.fetched")
        try:
            folder = self._at(f"{key}/{entry.folder}")
            fetched = _downloaded(folder, home, progress)
            problems = ["it has no files"] if fetched is None else _problems(fetched, entry)
            if fetched is None or problems:
                progress(f"the engine {folder} is damaged ({'; '.join(problems)}); it is removed and compiled again")
                self._remove_version(key + _ENTRY, etag)
                self._remove_unnamed(key, entry.folder)
                return False
            # Written last, as in an engine compiled here.
            (fetched / MANIFEST_FILE).touch()
            fetched.rename(out)
            progress(f"downloaded the engine from {folder}")
            return True
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _raise_failure(self, key: str) -> None:
        answer = _ask("get_object", self._at(key + _FAILURE), _ABSENT)
        if answer is None or (age := _age(answer)) > _FAILED_SECONDS:
            return
        try:
            failure = msgspec.json.decode(_content(answer, self.address), type=_Failure)
        except msgspec.DecodeError:
            return
        raise EngineError(
            f"compiling this engine failed on {failure.machine} {age:.0f} s ago, and the machines that share "
            f"{self.address} do not try again for {_FAILED_SECONDS - age:.0f} s, or until `djl-trtllm cache prune "
            f"{self.address}`: {failure.reason}"
        )

    def _lease(self, key: str) -> Lease:
        return Lease(self._at(key + _LEASE), self.lease_seconds)

    def _at(self, name: str) -> S3Address:
        return S3Address(self.address.bucket, self.address.below(name))

    def _entry(self, key: str) -> tuple[_Entry, str] | None:
        answer = _ask("get_object", self._at(key + _ENTRY), _ABSENT)
        if answer is None:
            return None
        try:
            return msgspec.json.decode(_content(answer, self.address), type=_Entry), answer["ETag"]
        except msgspec.DecodeError:
            self._remove_version(key + _ENTRY, answer["ETag"])
            return None

    def _remove_version(self, name: str, etag: str) -> bool:
        """Remove an object if it is still this version; returns whether it was."""
        return _ask("delete_object", self._at(name), _OVERTAKEN, IfMatch=etag) is not None

    def _upload(self, key: str, out: Path, progress: Callable[[str], None]) -> None:
        """Upload the engine for other machines; this one continues without it if that fails."""
        folder = secrets.token_hex(8)
        try:
            upload(out, str(self._at(f"{key}/{folder}")), progress)
            entry = msgspec.json.encode(_Entry(folder, json.loads((out / MANIFEST_FILE).read_bytes())))
            # The engine of a machine that was first is as good.
            _ask("put_object", self._at(key + _ENTRY), (409, 412), Body=entry, IfNoneMatch="*")
        except (DownloadError, OSError) as error:
            progress(f"the engine was not uploaded: {error}; other machines compile it themselves")
        try:
            self._remove_unnamed(key, folder)
        except DownloadError as error:
            log.info("files of %s may be left in %s, `djl-trtllm cache prune` removes them: %s", key, folder, error)

    def _remove_unnamed(self, key: str, folder: str) -> None:
        """Remove the files of a folder, unless the entry names it."""
        found = self._entry(key)
        if found is None or found[0].folder != folder:
            _remove(self.address.bucket, [each["Key"] for each in s3.listed(self._at(f"{key}/{folder}"))])

    def prune(self, max_bytes: int, progress: Callable[[str], None]) -> int:
        """Keep the engines that were compiled last, as many as fit into `max_bytes`; return the number of bytes
        removed.

        The first engine that does not fit goes, and all that were compiled before it. All leftovers go too: failures,
        and the leases, folders and incomplete uploads of machines that died. What belongs to a held lease stays, and so
        do engines that are compiled meanwhile, and objects that have no name of an engine cache. Raises DownloadError.
        """
        engines, others = self._contents()
        if others:
            progress(f"{others} objects under {self.address} are not an engine cache's, and stay")
        left, removed, full = 0, 0, False
        for key, objects in sorted(engines.items(), key=lambda item: _compiled(item[1]), reverse=True):
            if self._lease(key).is_held():
                progress(f"{key} stays: a machine is compiling it")
                continue
            entry = self._entry(key)
            if entry is not None and (_ENTRY not in objects or objects[_ENTRY]["ETag"] != entry[1]):
                progress(f"{key} stays: a machine has just compiled it")
                continue
            whole = [] if entry is None else [name for name in objects if name.startswith(f"/{entry[0].folder}/")]
            size = _bytes(objects[name] for name in whole)
            full = full or left + size > max_bytes
            if whole and not full:
                left += size
                objects = {name: each for name, each in objects.items() if name not in {*whole, _ENTRY}}
            gone = self._remove_listed(key, objects)
            if gone:
                removed += _bytes(gone)
                progress(f"removed {key} ({len(gone)} objects, {format_bytes(_bytes(gone))})")
        self._abort_uploads(progress)
        return removed

    def _remove_listed(self, key: str, objects: dict[str, Any]) -> list[Any]:
        """Remove objects of one key; returns those gone. A newer entry or lease stays."""
        # The entry first: without it, no machine looks for the files.
        written = [name for name in (_ENTRY, _LEASE) if name in objects]
        gone = [objects[name] for name in written if self._remove_version(key + name, objects[name]["ETag"])]
        files = [each for name, each in objects.items() if name not in written]
        _remove(self.address.bucket, [each["Key"] for each in files])
        return gone + files

    def _named(self, listed: Any) -> re.Match[str] | None:
        """The name of a listed object or upload: its key, and what it is; None if it is none of the cache's."""
        return _NAME.fullmatch(listed["Key"][len(self.address.below("")) :])

    def _contents(self) -> tuple[dict[str, dict[str, Any]], int]:
        """The listed objects by the cache's keys and by what they are, and the number of others."""
        engines: dict[str, dict[str, Any]] = {}
        others = 0
        for each in s3.listed(self.address):
            if (name := self._named(each)) is None:
                others += 1
            else:
                engines.setdefault(name[1], {})[name[2]] = each
        return engines, others

    def _abort_uploads(self, progress: Callable[[str], None]) -> None:
        """Abort the incomplete uploads in parts that no machine continues."""
        with s3.download_errors(self.address):
            pages = s3.client().get_paginator("list_multipart_uploads")
            found = pages.paginate(Bucket=self.address.bucket, Prefix=self.address.below(""))
            uploads = [each for page in found for each in page.get("Uploads", ())]
        # Asked after the list: who has begun one of these held the lease then, and holds it or has completed them.
        is_held = cache(lambda key: self._lease(key).is_held())
        for each in uploads:
            name, at = self._named(each), S3Address(self.address.bucket, each["Key"])
            if name is None or is_held(name[1]):
                continue
            if _ask("abort_multipart_upload", at, _ABSENT, UploadId=each["UploadId"]) is not None:
                progress(f"ended an incomplete upload of {each['Key']}")


def _downloaded(folder: S3Address, home: Path, progress: Callable[[str], None]) -> Path | None:
    """The directory with an engine's files; None if there are none. Raises DownloadError."""
    try:
        fetched = download(folder, home, progress, select=sorted)
    except DownloadError:
        if s3.listed(folder):
            raise
        return None  # a lifecycle rule or `prune` has removed them
    (fetched / RECORD).unlink()
    return fetched


def _compiled(objects: dict[str, Any]) -> float:
    """The time at which an engine became complete, which is the time of its entry."""
    return float(objects[_ENTRY]["LastModified"].timestamp()) if _ENTRY in objects else 0.0


def _bytes(objects: Iterable[Any]) -> int:
    return sum(each["Size"] for each in objects)


_MOST_REMOVED = 1000
"""S3's bound for the objects of one request."""


def _remove(bucket: str, keys: list[str]) -> None:
    """Remove objects from the bucket. Raises DownloadError."""
    for at in range(0, len(keys), _MOST_REMOVED):
        objects = [{"Key": key} for key in keys[at : at + _MOST_REMOVED]]
        with s3.download_errors(f"s3://{bucket}"):
            ask = partial(s3.client().delete_objects, Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
            answer = s3.patiently(ask, time.monotonic() + s3.PATIENCE_SECONDS)
        for error in answer.get("Errors", ()):
            raise DownloadError(f"s3://{bucket}/{error['Key']} was not removed: {error['Code']} ({error['Message']})")


def _problems(directory: Path, entry: _Entry) -> list[str]:
    try:
        manifest = Manifest.read(directory)
    except EngineMismatchError as error:
        return [str(error)]
    if manifest is None or msgspec.to_builtins(manifest) != entry.manifest:
        return ["its manifest is missing or a different one"]
    return manifest.verify(directory)
