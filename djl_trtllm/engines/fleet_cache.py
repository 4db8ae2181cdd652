"""An engine cache in S3: a fleet of machines compiles an engine once."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from botocore.exceptions import ClientError

from djl_trtllm.engines.lease import Lease
from djl_trtllm.engines.manifest import MANIFEST_FILE, Manifest
from djl_trtllm.errors import DownloadError, EngineMismatchError
from djl_trtllm.model.remote import s3
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.remote.s3_download import RECORD, download
from djl_trtllm.model.remote.upload import upload

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
        lease = Lease(self.address.bucket, self.address.below(f"{key}.lease"), self.lease_seconds)
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
            folder = S3Address(self.address.bucket, self.address.below(f"{key}/{entry.folder}"))
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

    def _entry(self, key: str) -> tuple[_Entry, str] | None:
        name = self.address.below(f"{key}.json")
        with s3.download_errors(f"s3://{self.address.bucket}/{name}"):
            try:
                answer = s3.client().get_object(Bucket=self.address.bucket, Key=name)
            except ClientError as error:
                if s3.status(error) == 404 and error.response["Error"]["Code"] != "NoSuchBucket":
                    return None
                raise
            content = answer["Body"].read()
        try:
            return msgspec.json.decode(content, type=_Entry), answer["ETag"]
        except msgspec.DecodeError:
            self._remove(key, answer["ETag"])
            return None

    def _remove(self, key: str, etag: str) -> None:
        name = self.address.below(f"{key}.json")
        with s3.download_errors(f"s3://{self.address.bucket}/{name}"):
            try:
                s3.client().delete_object(Bucket=self.address.bucket, Key=name, IfMatch=etag)
            except ClientError as error:
                if s3.status(error) not in (404, 409, 412):  # another machine replaced it
                    raise

    def _upload(self, key: str, out: Path, progress: Callable[[str], None]) -> None:
        """Upload the engine for other machines; this one continues without it if that fails."""
        folder = secrets.token_hex(8)
        try:
            upload(out, str(S3Address(self.address.bucket, self.address.below(f"{key}/{folder}"))), progress)
            entry = msgspec.json.encode(_Entry(folder, json.loads((out / MANIFEST_FILE).read_bytes())))
            with s3.download_errors(self.address):
                name = self.address.below(f"{key}.json")
                try:
                    s3.client().put_object(Bucket=self.address.bucket, Key=name, Body=entry, IfNoneMatch="*")
                except ClientError as error:
                    if s3.status(error) not in (409, 412):  # another machine was first: its engine is equivalent
                        raise
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
