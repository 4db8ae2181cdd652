from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from djl_trtllm.cli import app

runner = CliRunner()


def test_compile_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    result = runner.invoke(app, ["compile", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "expected one of" in result.stderr


def test_compile_takes_the_flags_of_trtllm_build(tmp_path: Path) -> None:
    flags = [f"--checkpoint_dir={tmp_path}", "--output_dir", str(tmp_path / "out"), "--workers=2"]
    result = runner.invoke(app, ["compile", *flags, "--max_batch_size", "many"])
    assert result.exit_code == 1
    assert "--workers: no effect" in result.stderr
    assert "option.max_num_sequences=many (command line)" in result.stderr
    result = runner.invoke(app, ["compile", *flags])
    assert (result.exit_code, "expected one of" in result.stderr) == (1, True)
    result = runner.invoke(app, ["compile", str(tmp_path)])
    assert "name a checkpoint and an output" in result.stderr
    assert runner.invoke(app, ["compile", "--help"]).exit_code == 0
