"""boto3's client of SageMaker's runtime, with a server of a test in the place of an endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import botocore.config


@contextmanager
def runtime_of(url: str) -> Iterator[Any]:
    """A client of the server at `url`, which asks once."""
    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=url,
        region_name="eu-west-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=botocore.config.Config(retries={"max_attempts": 0}, proxies={}),
    )
    yield client
    client.close()
