"""A lease in S3: one machine at a time holds it, and a dead machine loses it."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import ClientError

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import s3

log = logging.getLogger(__name__)


class Lease:
    """The right to do one thing, held by renewing an object in the bucket.

    The object is written only if it does not exist, or over one that was not renewed for `seconds`; S3's conditional
    writes decide between competitors (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html).
    Only the store's clock is used for ages. All methods raise DownloadError if the store fails.
    """

    def __init__(self, bucket: str, key: str, seconds: float) -> None:
        self._bucket = bucket
        self._key = key
        self._seconds = seconds
        self._owner = f"{socket.gethostname()} {secrets.token_hex(8)}"
        self._etag: str

    def acquire(self) -> bool:
        """Try to acquire it; False while another machine holds it."""
        with s3.download_errors(f"s3://{self._bucket}/{self._key}"):
            if self._write(IfNoneMatch="*"):
                return True
            try:
                held = s3.client().head_object(Bucket=self._bucket, Key=self._key)
            except ClientError as error:
                if s3.status(error) == 404:  # released just now
                    return self._write(IfNoneMatch="*")
                raise
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
                with s3.download_errors(f"s3://{self._bucket}/{self._key}"):
                    s3.client().delete_object(Bucket=self._bucket, Key=self._key, IfMatch=self._etag)
            except DownloadError as error:
                # Another machine holds it, or the store is unreachable: it expires by itself.
                log.info("the lease was not released: %s", error)

    def _renew(self, done: threading.Event) -> None:
        while not done.wait(self._seconds / 4):
            try:
                with s3.download_errors(f"s3://{self._bucket}/{self._key}"):
                    renewed = self._write(IfMatch=self._etag)
            except DownloadError as error:
                log.warning("cannot renew the lease: %s", error)
                continue
            if not renewed:
                log.warning("another machine took over the lease s3://%s/%s", self._bucket, self._key)
                return

    def _write(self, **condition: Any) -> bool:
        try:
            # Write new content at each renewal, so that the ETag changes.
            content = f"{self._owner} {secrets.token_hex(4)}".encode()
            answer = s3.client().put_object(Bucket=self._bucket, Key=self._key, Body=content, **condition)
        except ClientError as error:
            if s3.status(error) in (404, 409, 412):
                return False
            raise
        self._etag = answer["ETag"]
        return True
