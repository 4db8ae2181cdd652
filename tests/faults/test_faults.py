"""The short forms of the kinds of faults: no more requests fail than may, and nothing is left."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.faults.__main__ import rows_of, shown
from tests.faults.kinds import KINDS


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), [(name, engine) for name, kind in KINDS.items() for engine in kind.short])
def test_a_fault_costs_what_it_may(name: str, engine: str) -> None:
    with closing(rows_of(KINDS[name], engine, streams=8, times=2, short=True)) as rows:
        for row in rows:
            print(shown(row))
            if row.skipped:
                pytest.skip(row.note)
            assert row.passed, row
