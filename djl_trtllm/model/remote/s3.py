"""S3 addresses, the client, and errors that say what to do."""

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

from djl_trtllm.errors import DownloadError
from djl_trtllm.files import read_table

_SCHEME = "s3://"
_CONNECT_SECONDS = 10
_READ_SECONDS = 30
_ATTEMPTS = 6
_POOL = 64
_ARN = re.compile(r"(arn:[^/]*:(?:outpost[:/][^/:]+[:/])?accesspoint[:/][^/]+)(?:/(.*))?", re.DOTALL)
"""An access point in place of a bucket: its name ends the ARN, after a slash or a colon, and the key follows."""

_ADVICE: dict[str, str] = read_table("advice.toml", __package__)["s3"]


class S3Address(NamedTuple):
    """`s3://bucket/key`; `key` has no slash at either end and is empty for a whole bucket.

    `bucket` may be the ARN of an access point: `s3://arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME/key`.
    """

    bucket: str
    key: str

    @classmethod
    def parse(cls, text: str) -> "S3Address":
        """Parse an S3 address. Raises DownloadError for other text."""
        rest = text.removeprefix(_SCHEME)
        bucket, _, key = rest.partition("/")
        if (access_point := _ARN.fullmatch(rest)) is not None:
            bucket, key = access_point[1], access_point[2] or ""
        if not text.startswith(_SCHEME) or not bucket or (bucket.startswith("arn:") and access_point is None):
            raise DownloadError(
                f"{text} is not an S3 address: expected s3://BUCKET/PREFIX, where the bucket may be the alias or the "
                "ARN of an access point (arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME)"
            )
        return cls(bucket, key.strip("/"))

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.key}"

    def below(self, name: str) -> str:
        """The key of a name below this address; with an empty name, the prefix of all of them."""
        return f"{self.key}/{name}" if self.key else name


def is_s3(text: str) -> bool:
    """Return whether the text is meant for an S3 address; `S3Address.parse` says what is wrong with `s3:/bucket`."""
    return text.startswith("s3:")


_creating = threading.Lock()


@cache
def _client(environment: tuple[tuple[str, str], ...]) -> Any:
    # This is botocore's client, the one boto3 returns too: importing boto3 itself takes as long again, which is most of
    # the time that a start with a complete download takes.
    from botocore.config import Config
    from botocore.session import Session

    config = Config(
        max_pool_connections=_POOL,
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
    )
    # boto3 reads only AWS_DEFAULT_REGION; AWS_REGION, which containers on AWS have, comes first here as in other SDKs.
    return Session().create_client("s3", region_name=os.environ.get("AWS_REGION") or None, config=config)


def client() -> Any:
    """An S3 client with retries and enough connections; one per process and environment.

    Uses boto3's credentials, region and AWS_ENDPOINT_URL. Raises DownloadError.
    """
    with _creating, download_errors("S3"):
        return _client(tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))))


PATIENCE_SECONDS = 120.0
"""Seconds for which a store that is asked too often is asked again, where nothing else says how long."""
_THROTTLED = {"SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "TooManyRequests", "Throttling", "503", "429"}
FIRST_PAUSE_SECONDS, _LONGEST_PAUSE = 0.5, 30.0

_Answer = TypeVar("_Answer")


def patiently(
    call: Callable[[], _Answer],
    until: float,
    wait: Callable[[float], object] = time.sleep,
) -> _Answer:
    """Return the result of `call`; call it again while the store says that it is asked too often, until `until`.

    botocore's own attempts end after seconds, and at once where many threads have used up what its client may repeat.
    `until` is a time of `time.monotonic`; no repetition begins after it, or after `wait(seconds)` was true. Each pause
    is twice as long as the one before, from about half a second to 30.
    """
    from botocore.exceptions import ClientError

    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return call()
        except ClientError as error:
            throttled = error.response.get("Error", {}).get("Code") in _THROTTLED
            if not throttled or time.monotonic() + pause > until or wait(pause * random.uniform(0.5, 1)):  # noqa: S311  # no secret
                raise
        pause = min(2 * pause, _LONGEST_PAUSE)


def listed(address: S3Address, patience: float = PATIENCE_SECONDS) -> list[Any]:
    """The objects below an address as S3 lists them, by key. Raises DownloadError.

    Asks for the prefix with its slash: policies name it so (`s3:prefix`), and directory buckets take no other one.
    """

    def all_pages() -> list[Any]:
        pages = client().get_paginator("list_objects_v2").paginate(Bucket=address.bucket, Prefix=address.below(""))
        return [entry for page in pages for entry in page.get("Contents", ())]

    with download_errors(address):
        return patiently(all_pages, time.monotonic() + patience)


@contextmanager
def download_errors(what: object) -> Iterator[None]:
    """Turn exceptions of botocore in the block into a DownloadError about `what`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise DownloadError(f"{what}: {_explain(error)}") from error
    except BotoCoreError as error:
        raise DownloadError(f"{what}: {_explain_local(error)}") from error


def status(error: Any) -> int:
    """The HTTP status of a ClientError; 0 if it has none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _explain(error: Any) -> str:
    code = str(error.response.get("Error", {}).get("Code", ""))
    message = str(error.response.get("Error", {}).get("Message", ""))
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region")
    advice = _ADVICE.get(code)
    if advice is None:
        return f"the store answered {code} ({message}), status {status(error)}"
    return f"{advice} ({code}{f', the bucket is in {region}' if region else ''})"


def _explain_local(error: Any) -> str:
    names = (base.__name__ for base in type(error).__mro__)
    advice = next((_ADVICE[name] for name in names if name in _ADVICE), None)
    return f"{type(error).__name__}: {error}" if advice is None else f"{advice} ({error})"
