from __future__ import annotations

import pytest

from djl_trtllm.sizing.buffers import FITTED, GIB, EngineConstants
from djl_trtllm.sizing.check_tables import rows
from tools.sizing import fit


@pytest.mark.slow
def test_the_constants_are_those_that_the_fit_finds(capsys: pytest.CaptureFixture[str]) -> None:
    fit.main()
    expected = f"scale {FITTED.scale}, overhead {FITTED.overhead / GIB} GiB, eight ranks {FITTED.eight_ranks / GIB} GiB"
    assert capsys.readouterr().out.startswith(f"{expected}\n")


def test_an_estimate_above_costs_more_than_one_as_far_below() -> None:
    exact = [check for check in rows() if check.ratio is not None and 0.97 < check.ratio < 1]
    assert 0 < fit.cost(exact) < 0.03 * len(exact)
    above = [check for check in rows() if check.ratio is not None and check.ratio > 1]
    assert fit.cost(above) > 0


def test_memory_that_is_wrong_costs_most() -> None:
    nothing = rows(EngineConstants(scale=1.0, overhead=0, eight_ranks=0))
    wrong = [check for check in nothing if check.row.max_num_tokens is None]
    assert fit.cost(wrong) == 5.0
