"""AWS clients."""

from __future__ import annotations

import os
from typing import Any


def client(service: str, config: Any = None) -> Any:
    """A client of an AWS service, with boto3's credentials.

    boto3 reads only AWS_DEFAULT_REGION; AWS_REGION, which containers on AWS have, comes first here as in other SDKs.
    This is botocore's client, the one boto3 returns too: importing boto3 itself takes as long again, which is most of
    the time that a start with a complete download takes.
    """
    from botocore.session import Session

    return Session().create_client(service, region_name=os.environ.get("AWS_REGION") or None, config=config)
