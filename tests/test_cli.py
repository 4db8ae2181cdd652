"""The command that leads to the package's commands."""

from __future__ import annotations

from typer.testing import CliRunner

from djl_trtllm.cli import SUMMARIES, app


def test_commands_stand_in_the_order_of_use_and_each_has_help() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["--help"], terminal_width=120).output
    places = [shown.index(f" {name} ") for name in SUMMARIES]
    assert places == sorted(places)
    for name in SUMMARIES:
        done = runner.invoke(app, [name, "--help"])
        assert done.exit_code == 0 and "Usage" in done.output
