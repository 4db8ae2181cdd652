from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.in_process import Hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Played hosts in the place of engine process processes."""
    with Hosts().installed() as hosts:
        yield hosts
