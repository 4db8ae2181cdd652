"""The AWS session of this process."""

from __future__ import annotations

import os
from typing import Any


def session() -> Any:
    """A boto3 session with credentials as boto3 finds them.

    boto3 knows AWS_DEFAULT_REGION alone; AWS_REGION, which containers on AWS have, comes first here as in other SDKs.
    """
    import boto3

    return boto3.session.Session(region_name=os.environ.get("AWS_REGION") or None)
