"""What the search and its commands are tested with."""

from __future__ import annotations

from tests.finder.helpers import trials

__all__ = ["trials"]
