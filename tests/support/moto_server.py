"""moto's AWS in this process: S3 with conditional writes, and SageMaker's control plane."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Iterator
from typing import Any

BUCKET = "fleet-bucket"


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """An AWS with one bucket; its endpoint URL."""
    # Seconds of imports, which collecting the tests does without.
    import boto3
    import httpx
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        # Its state is the process's, and outlives the server.
        httpx.post(f"{url}/moto-api/reset", trust_env=False, timeout=60).raise_for_status()
        client(url).create_bucket(Bucket=BUCKET)
        yield url
    finally:
        boto3.DEFAULT_SESSION = None
        server.stop()


def client(url: str, service: str = "s3") -> Any:
    """A boto3 client of it."""
    import boto3

    return boto3.session.Session("test", "test", region_name="us-east-1").client(service, endpoint_url=url)


def keys(url: str, prefix: str = "") -> list[str]:
    """The keys in the bucket."""
    return [entry["Key"] for entry in client(url).list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())]


def age(suffix: str, seconds: float) -> None:
    """Let the only object whose key ends so have been written `seconds` earlier."""
    from moto.core.models import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    bucket = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET]
    (aged,) = (key for name, key in bucket.keys.items() if name.endswith(suffix))
    aged.last_modified -= datetime.timedelta(seconds=seconds)
