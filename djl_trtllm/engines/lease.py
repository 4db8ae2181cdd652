"""A lease in S3: of all machines one has it, and a machine that died loses it."""

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

_TAKEN = (409, 412)


class Lease:
    """The right to do one thing, held while an object in the bucket is renewed.

    It is written only where there is none, or over one that was not renewed for `seconds`; S3's conditional writes
    decide between two that try (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html). Ages
    are by the store's clock alone. All methods raise DownloadError where the store fails.
    """

    def __init__(self, bucket: str, key: str, seconds: float) -> None:
        self._bucket = bucket
        self._key = key
        self._seconds = seconds
        self._owner = f"{socket.gethostname()} {secrets.token_hex(8)}"
        self._etag: str

    def acquire(self) -> bool:
        """Try to get it; False while another has it."""
        with s3.told(f"s3://{self._bucket}/{self._key}"):
            if self._write(IfNoneMatch="*"):
                return True
            try:
                held = s3.client().head_object(Bucket=self._bucket, Key=self._key)
            except ClientError as error:
                if s3.status(error) == 404:  # given back just now
                    return self._write(IfNoneMatch="*")
                raise
            now = parsedate_to_datetime(held["ResponseMetadata"]["HTTPHeaders"]["date"])
            expired = (now - held["LastModified"]).total_seconds() > self._seconds
            return expired and self._write(IfMatch=held["ETag"])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Renew it while the block runs, and give it back."""
        done = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(done,), name="lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            done.set()
            renewing.join()
            self._give_back()

    def _renew(self, done: threading.Event) -> None:
        while not done.wait(self._seconds / 4):
            try:
                with s3.told(f"s3://{self._bucket}/{self._key}"):
                    renewed = self._write(IfMatch=self._etag)
            except DownloadError as error:
                log.warning("the lease could not be renewed: %s", error)
                continue
            if not renewed:
                log.warning("the lease s3://%s/%s was taken over by another machine", self._bucket, self._key)
                return

    def _give_back(self) -> None:
        try:
            with s3.told(f"s3://{self._bucket}/{self._key}"):
                s3.client().delete_object(Bucket=self._bucket, Key=self._key, IfMatch=self._etag)
        except DownloadError as error:
            # Not ours any more, or the store is gone: it expires by itself.
            log.info("the lease was not given back: %s", error)

    def _write(self, **condition: Any) -> bool:
        try:
            # Another content at each renewal, so that the ETag changes with it.
            content = f"{self._owner} {secrets.token_hex(4)}".encode()
            answer = s3.client().put_object(Bucket=self._bucket, Key=self._key, Body=content, **condition)
        except ClientError as error:
            if s3.status(error) in (*_TAKEN, 404):
                return False
            raise
        self._etag = answer["ETag"]
        return True
