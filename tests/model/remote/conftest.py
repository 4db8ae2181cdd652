"""A store in S3."""

from __future__ import annotations

from tests.support.s3_fixtures import s3, store

__all__ = ["s3", "store"]
