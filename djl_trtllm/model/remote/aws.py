"""AWS clients of this process."""

from __future__ import annotations

import os
from typing import Any


def client(service: str, config: Any = None) -> Any:
    """A client of an AWS service, with credentials as boto3 finds them.

    boto3 knows AWS_DEFAULT_REGION alone; AWS_REGION, which containers on AWS have, comes first here as in other SDKs.
    It is botocore's own client, which is what boto3 hands out too: boto3 itself takes as long again to import, and a
    server that has its model already waits for little else.
    """
    from botocore.session import Session

    return Session().create_client(service, region_name=os.environ.get("AWS_REGION") or None, config=config)
