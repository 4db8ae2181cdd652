"""`djl-trtllm package`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm import cli

runner = CliRunner()


def test_package_writes_an_archive(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.tar.gz"
    result = runner.invoke(cli.app, ["package", str(model), "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    assert "1 files" in result.stderr and out.is_file()


def test_package_refuses_what_serving_would_refuse(model: Path, tmp_path: Path) -> None:
    (model / "serving.properties").write_text("option.max_input_len=many\n")
    result = runner.invoke(cli.app, ["package", str(model), "--out", str(tmp_path / "model.tar.gz")])
    assert result.exit_code == 1
    assert "option.max_input_len=many" in result.stderr
    assert not (tmp_path / "model.tar.gz").exists()


@pytest.mark.parametrize("address", ["s3://bucket/model", "hf://owner/name"])
def test_an_address_is_no_directory_to_pack_and_the_error_says_what_works(address: str, tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["package", address, "--out", str(tmp_path / "model.tar.gz")])
    said = " ".join(result.stderr.split())
    assert result.exit_code == 1
    assert f"{address} is an address" in said
    assert f"djl-trtllm serve {address}" in said
    assert f"option.model_id={address}" in said


def test_what_is_no_directory_is_not_packed(tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["package", str(tmp_path / "none"), "--out", str(tmp_path / "model.tar.gz")])
    assert result.exit_code == 1
    assert "is not a directory" in " ".join(result.stderr.split())
