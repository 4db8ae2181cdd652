"""`djl-trtllm package`, `deploy` and `cache`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm import cli
from djl_trtllm.engine.cache import EngineCache
from tests.engine.cache_entries import build
from tests.support.moto_server import client, moto_server
from tests.support.s3_server import variables

runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "story").mkdir()
    (tmp_path / "story" / "serving.properties").write_text("option.model_id=acme/story\n")
    return tmp_path / "story"


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


def test_deploy_dry_run_prints_the_calls_and_sends_none(model: Path) -> None:
    result = runner.invoke(
        cli.app, ["deploy", str(model), "--image", "IMAGE", "--role", "ROLE", "--dry-run", "-e", "OPTION_DTYPE=fp16"]
    )
    assert result.exit_code == 0, result.stderr
    calls = [json.loads(text) for text in result.stdout.replace("}\n{", "}\0{").split("\0")]
    assert [call["call"] for call in calls] == ["create_model", "create_endpoint_config", "create_endpoint"]
    assert calls[0]["PrimaryContainer"]["Environment"] == {"OPTION_DTYPE": "fp16"}
    assert calls[0]["PrimaryContainer"]["ModelDataUrl"] == "s3://BUCKET/djl-trtllm/story/model.tar.gz"


def test_deploy_says_what_is_missing(model: Path) -> None:
    result = runner.invoke(cli.app, ["deploy", str(model)], env={"DJL_TRTLLM_IMAGE": "", "SAGEMAKER_ROLE": ""})
    assert result.exit_code == 1
    assert "--image" in result.stderr and "--role" in result.stderr


def test_deploy_packs_uploads_and_makes_an_endpoint_and_delete_removes_it(model: Path) -> None:
    with moto_server() as url:
        settings = variables(url)
        image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/djl-trtllm:0.1"
        arguments = [
            "--image",
            image,
            "--role",
            "arn:aws:iam::123456789012:role/R",
            "--instance-type",
            "ml.g4dn.xlarge",
        ]
        made = runner.invoke(cli.app, ["deploy", str(model), *arguments], env=settings)
        assert made.exit_code == 0, made.stderr
        assert client(url, "sagemaker").describe_endpoint(EndpointName="story")["EndpointStatus"] == "InService"
        gone = runner.invoke(cli.app, ["deploy", "--delete", "story"], env=settings)
        assert gone.exit_code == 0, gone.stderr
        assert client(url, "sagemaker").list_endpoints()["Endpoints"] == []


def test_cache_lists_verifies_and_prunes(tmp_path: Path) -> None:
    settings = {"OPTION_ENGINE_CACHE_DIR": str(tmp_path)}
    build(tmp_path / "openvino-one")
    listed = runner.invoke(cli.app, ["cache", "ls"], env=settings)
    assert listed.exit_code == 0 and "openvino-one" in listed.stdout
    assert runner.invoke(cli.app, ["cache", "verify"], env=settings).exit_code == 0
    (tmp_path / "openvino-one" / "model.bin").write_bytes(b"damaged")
    damaged = runner.invoke(cli.app, ["cache", "verify"], env=settings)
    assert damaged.exit_code == 1 and "model.bin" in damaged.stderr
    pruned = runner.invoke(cli.app, ["cache", "prune"], env=settings)
    assert pruned.exit_code == 0 and "0 engines are left" in pruned.stderr
    assert EngineCache(tmp_path).entries() == []
