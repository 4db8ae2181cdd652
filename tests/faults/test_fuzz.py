"""The short form of `python -m tests.faults.fuzz`: no answer is a 500, none is missing, and nothing of them is left."""

from __future__ import annotations

import os

import pytest

from tests.faults.fuzz import fuzz_archives, fuzz_requests, targets

pytestmark = pytest.mark.slow

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "3000"))
ARCHIVES = int(os.environ.get("FUZZ_ARCHIVES", "200"))


def test_hostile_archives_are_extracted_or_refused() -> None:
    assert fuzz_archives(ARCHIVES) == []


def test_damaged_requests_of_every_dialect_are_answered() -> None:
    outcome = fuzz_requests(REQUESTS)
    print(dict(outcome.statuses), outcome.memory)
    assert outcome.wrong == []
    assert sum(outcome.statuses.values()) == REQUESTS
    assert min(outcome.statuses[200], outcome.statuses[400]) > REQUESTS / 50


def test_every_path_that_takes_a_body_is_a_target() -> None:
    assert {"/invocations", "/v1/chat/completions", "/generate", "/v2/models/scripted/infer", "/tokenize"} <= {
        path for path, _ in targets()
    }
