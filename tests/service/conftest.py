"""Shared by the tests of services."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.kit import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Every `ModelService` has its engine processes here."""
    stage = Stage()
    with stage.installed():
        yield stage
