"""Tests of the backends."""

from tests.support.tables import rows

__all__ = ["rows"]
