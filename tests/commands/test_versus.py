from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from djl_trtllm import cli
from tests.support.tables import by_table


@by_table("engines", "more", "said")
def test_a_wrong_comparison_is_an_error_that_names_it(engines: str, more: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["versus", str(tmp_path), "--engines", engines, *more])
    assert result.exit_code == 1
    assert said in result.stderr and len(result.stderr.splitlines()) == 1
