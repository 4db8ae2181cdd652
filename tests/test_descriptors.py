"""The limit of file descriptors."""

from __future__ import annotations

import resource

import pytest

from djl_trtllm.descriptors import raise_limit


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "given", "result"),
    [
        (1024, 4096, 1024, [], 1024),
        (1024, 4096, 1025, [(1025, 4096)], 1025),
        (1024, 4096, 9000, [(4096, 4096)], 4096),
        (1024, 1024, 9000, [], 1024),
    ],
)
def test_the_limit_is_raised_as_far_as_it_is_needed_and_may_be(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, needed: int, given: list[tuple[int, int]], result: int
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: limits.append(wanted))
    assert raise_limit(needed) == result
    assert limits == given
