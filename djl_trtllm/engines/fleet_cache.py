"""An engine cache in S3: a fleet of machines compiles an engine once.

The machine that compiles holds a lease, and a dead machine loses it.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import msgspec
from botocore.exceptions import ClientError

from djl_trtllm.engines.cache import MANIFEST_FILE, Manifest
from djl_trtllm.errors import DownloadError, EngineMismatchError
from djl_trtllm.model.remote import s3
from djl_trtllm.model.remote.fetch import upload
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.remote.s3_download import RECORD, download

log = logging.getLogger(__name__)


def _ask(method: str, address: S3Address, unless: tuple[int, ...], **arguments: Any) -> Any | None:
    """The store's answer to a request for one object; None where its status is in `unless`. Raises DownloadError."""
    with s3.download_errors(address):
        try:
            return getattr(s3.client(), method)(Bucket=address.bucket, Key=address.key, **arguments)
        except ClientError as error:
            if s3.status(error) in unless and error.response["Error"]["Code"] != "NoSuchBucket":
                return None
            raise


_ABSENT = (404,)
_OVERTAKEN = (404, 409, 412)
"""Statuses of a conditional request: another machine has removed, is writing or has replaced the object."""


class Lease:
    """The right to do one thing, held by renewing an object in the bucket.

    The object is written only if it does not exist, or over one that was not renewed for `seconds`; S3's conditional
    writes decide between competitors (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html).
    Only the store's clock is used for ages. All methods raise DownloadError if the store fails.
    """

    def __init__(self, address: S3Address, seconds: float) -> None:
        self._address = address
        self._seconds = seconds
        self._owner = f"{socket.gethostname()} {secrets.token_hex(8)}"
        self._etag: str

    def acquire(self) -> bool:
        """Try to acquire it; False while another machine holds it."""
        if self._write(IfNoneMatch="*"):
            return True
        held = _ask("head_object", self._address, _ABSENT)
        if held is None:  # released just now
            return self._write(IfNoneMatch="*")
        now = parsedate_to_datetime(held["ResponseMetadata"]["HTTPHeaders"]["date"])
        expired = (now - held["LastModified"]).total_seconds() > self._seconds
        return expired and self._write(IfMatch=held["ETag"])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Renew it while the block runs, then release it."""
        done = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(done,), name="lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            done.set()
            renewing.join()
            try:
                _ask("delete_object", self._address, (), IfMatch=self._etag)
            except DownloadError as error:
                # Another machine holds it, or the store is unreachable: it expires by itself.
                log.info("the lease was not released: %s", error)

    def _renew(self, done: threading.Event) -> None:
        while not done.wait(self._seconds / 4):
            try:
                renewed = self._write(IfMatch=self._etag)
            except DownloadError as error:
                log.warning("cannot renew the lease: %s", error)
                continue
            if not renewed:
                log.warning("another machine took over the lease %s", self._address)
                return

    def _write(self, **condition: Any) -> bool:
        # New content at each renewal changes the ETag.
        content = f"{self._owner} {secrets.token_hex(4)}".encode()
        answer = _ask("put_object", self._address, _OVERTAKEN, Body=content, **condition)
        if answer is not None:
            self._etag = answer["ETag"]
        return answer is not None


_LEASE_SECONDS = 60.0
_WAIT_SECONDS = 3600.0
_POLL_SECONDS = 3.0
_REPORT_EVERY_SECONDS = 15.0


class _Entry(msgspec.Struct, frozen=True):
    """The object `KEY.json`; its presence says that `folder` is complete."""

    folder: str
    manifest: dict[str, Any]


@dataclass
class FleetCache:
    """Engines by key under an address in S3.

    An engine is in a folder of its own, `KEY/RANDOM/`. The object `KEY.json` names the folder that is valid; it is
    written last, and only if it does not exist. The builder holds the lease `KEY.lease`. If S3 cannot be used, the
    engine is built without it and `progress` gets the reason.
    """

    address: S3Address
    lease_seconds: float = _LEASE_SECONDS
    wait_seconds: float = _WAIT_SECONDS

    def provide(self, key: str, out: Path, build: Callable[[Path], None], progress: Callable[[str], None]) -> None:
        """Create the directory `out`: fetch it, or build it with `build(out)` and upload it for the others.

        Waits while another machine builds it, at most `wait_seconds`. Raises what `build` raises.
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
        """True if `out` was created; False if the wait was too long."""
        started = time.monotonic()
        reported = -_REPORT_EVERY_SECONDS
        lease = Lease(self._at(f"{key}.lease"), self.lease_seconds)
        while True:
            if self._fetch(key, out, progress):
                return True
            if lease.acquire():
                with lease.held():
                    # It may have become complete between the check and the lease.
                    if not self._fetch(key, out, progress):
                        build(out)
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

    def _fetch(self, key: str, out: Path, progress: Callable[[str], None]) -> bool:
        found = self._entry(key)
        if found is None:
            return False
        entry, etag = found
        home = out.with_name(f".{out.name}.fetched")
        try:
            folder = self._at(f"{key}/{entry.folder}")
            fetched = download(folder, home, progress, select=sorted)
            (fetched / RECORD).unlink()
            problems = _problems(fetched, entry)
            if problems:
                progress(f"the engine {folder} is damaged ({'; '.join(problems)}); it is removed and compiled again")
                self._remove(key, etag)
                return False
            # Written last, as in an engine compiled here.
            (fetched / MANIFEST_FILE).touch()
            fetched.rename(out)
            progress(f"downloaded the engine from {folder}")
            return True
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _at(self, name: str) -> S3Address:
        return S3Address(self.address.bucket, self.address.below(name))

    def _entry(self, key: str) -> tuple[_Entry, str] | None:
        answer = _ask("get_object", self._at(f"{key}.json"), _ABSENT)
        if answer is None:
            return None
        with s3.download_errors(self.address):
            content = answer["Body"].read()
        try:
            return msgspec.json.decode(content, type=_Entry), answer["ETag"]
        except msgspec.DecodeError:
            self._remove(key, answer["ETag"])
            return None

    def _remove(self, key: str, etag: str) -> None:
        _ask("delete_object", self._at(f"{key}.json"), _OVERTAKEN, IfMatch=etag)

    def _upload(self, key: str, out: Path, progress: Callable[[str], None]) -> None:
        """Upload the engine for other machines; this one continues without it if that fails."""
        folder = secrets.token_hex(8)
        try:
            upload(out, str(self._at(f"{key}/{folder}")), progress)
            entry = msgspec.json.encode(_Entry(folder, json.loads((out / MANIFEST_FILE).read_bytes())))
            # The engine of a machine that was first is as good.
            _ask("put_object", self._at(f"{key}.json"), (409, 412), Body=entry, IfNoneMatch="*")
        except (DownloadError, OSError) as error:
            progress(f"the engine was not uploaded: {error}; other machines compile it themselves")


def _problems(directory: Path, entry: _Entry) -> list[str]:
    try:
        manifest = Manifest.read(directory)
    except EngineMismatchError as error:
        return [str(error)]
    if manifest is None or msgspec.to_builtins(manifest) != entry.manifest:
        return ["its manifest is missing or a different one"]
    return manifest.verify(directory)
