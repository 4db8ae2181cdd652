"""A test process of pytest-xdist that crashed ends the run with status 2, as an interrupt does: its tests were not run.

xdist itself would end with 1, the status of tests that failed, which `.ci/run` runs again.
"""

from __future__ import annotations

from typing import Any

import pytest

_CRASHED = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        node.config.stash[_CRASHED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(_CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERRUPTED
