"""Tests that run all rows of a table: which rows they run, what a row has of its own, and what a failure says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.tables import by_rows


def test_all_rows_are_run_in_order_and_a_failure_names_its_row() -> None:
    seen = []

    @by_rows(("text", "number"), [("a", 1), ("b", 2), ("c", 3)])
    def below_2(text: str = "", number: int = 0) -> None:
        seen.append(text)
        assert number <= 2

    with pytest.raises(AssertionError) as failed:
        below_2()
    assert vars(failed.value)["__notes__"] == ["row 2: text='c', number=3"]
    assert seen == ["a", "b", "c"]


def test_a_row_that_raises_nothing_is_named_too() -> None:
    @by_rows("number", [0, 1])
    def divided(number: int = 0) -> None:
        with pytest.raises(ZeroDivisionError):
            assert 1 / number

    with pytest.raises(pytest.fail.Exception) as failed:
        divided()
    assert vars(failed.value)["__notes__"] == ["row 1: number=1"]


def test_a_table_without_rows_proves_nothing() -> None:
    with pytest.raises(ValueError, match="no rows"):
        by_rows("number", [])


@by_rows("row", [0, 1])
@by_rows("column", [0, 1])
def test_a_row_has_a_folder_and_an_environment_of_its_own(
    row: int, column: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(tmp_path.iterdir()) == [] and "ROW" not in os.environ
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROW", f"{row} {column}")


@by_rows("seconds", [5.0, 600.0])
async def test_a_row_has_a_virtual_time_of_its_own(seconds: float) -> None:
    assert asyncio.get_running_loop().time() == 0
    await asyncio.sleep(seconds)
