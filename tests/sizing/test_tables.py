"""The estimates beside the measurements of LMI's tables."""

from __future__ import annotations

import pytest

from djl_trtllm.sizing.estimate import FITTED, GIB, EngineConstants
from djl_trtllm.sizing.recommendation import TABLES
from tools.sizing import fit
from tools.sizing.check_tables import Check, model_sizes, render, rows

ROWS = rows()


def share(checks: list[Check], name: str) -> float:
    numbers = [check for check in checks if check.ratio is not None]
    good = [check for check in numbers if getattr(check, name)]
    return len(good) / len(numbers)


def test_every_row_of_both_tables_has_an_estimate() -> None:
    assert [check.row for check in ROWS] == [row for table in TABLES.values() for row in table]
    assert len(ROWS) == 40
    assert sum(check.fitted for check in ROWS) == 20


def test_the_estimate_is_at_or_under_what_was_measured_and_near_it_on_both_halves() -> None:
    for half in ([c for c in ROWS if c.fitted], [c for c in ROWS if not c.fitted], list(ROWS)):
        assert share(half, "not_above") >= 0.8
        assert share(half, "near") >= 0.75


def test_what_ran_out_of_memory_does_so_and_nothing_else() -> None:
    assert all(check.right_memory for check in ROWS)


def test_the_models_of_the_tables_have_the_sizes_that_rows_are_found_by() -> None:
    for check in ROWS:
        sizes = model_sizes(check.row.model.name)
        assert check.row.model.is_of(sizes.shape, sizes.experts), check.row.model.name


def test_the_parameters_of_the_models_are_those_of_their_files() -> None:
    # The totals of the index files, in billions of parameters.
    known = {
        "LLaMA 2 7B": 6.738,
        "LLaMA 3 70B": 70.554,
        "Mixtral 8x7B": 46.703,
        "Gemma 7B": 8.538,
        "CodeLLaMA 34B": 33.744,
    }
    for name, billions in known.items():
        assert round(model_sizes(name).parameters / 1e9, 3) == billions, name


def test_the_table_has_a_line_per_row_and_the_counts_of_both_halves() -> None:
    text = render(ROWS)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 42
    assert len({len(line) for line in lines}) == 1
    assert "| 0.28 | LLaMA 3 70B   | g5.48xl  | 8  | out of memory | out of memory |" in text
    assert "fitted half: at most 1.1 x measured in 19 of 20 (95%), within a factor of 2.5 in 19 of 20 (95%)" in text
    assert "held-out half: at most 1.1 x measured in 16 of 19 (84%), within a factor of 2.5 in 17 of 19 (89%)" in text
    assert "out of memory: 1 of 1 rows that failed, and 0 of the 39 that ran" in text


@pytest.mark.slow
def test_the_constants_are_those_that_the_fit_finds(capsys: pytest.CaptureFixture[str]) -> None:
    fit.main()
    expected = f"scale {FITTED.scale}, overhead {FITTED.overhead / GIB} GiB, eight ranks {FITTED.eight_ranks / GIB} GiB"
    assert capsys.readouterr().out.startswith(f"{expected}\n")


def test_an_estimate_above_costs_more_than_one_as_far_below_and_wrong_memory_most() -> None:
    exact = [check for check in rows() if check.ratio is not None and 0.97 < check.ratio < 1]
    assert 0 < fit.cost(exact) < 0.03 * len(exact)
    assert fit.cost([check for check in rows() if check.ratio is not None and check.ratio > 1]) > 0
    nothing = rows(EngineConstants(scale=1.0, overhead=0, eight_ranks=0))
    assert fit.cost([check for check in nothing if check.row.max_num_tokens is None]) == 5.0
