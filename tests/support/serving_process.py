"""The names by which other tests still know these."""

from __future__ import annotations

from tests.support.client import JSON, body
from tests.support.models import PROMPT, scripted_model
from tests.support.server import free_port
from tests.support.waiting import wait_until

__all__ = ["JSON", "PROMPT", "body", "free_port", "scripted_model", "wait_until"]
