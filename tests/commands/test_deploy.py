"""`djl-trtllm deploy`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from djl_trtllm import cli
from tests.support.moto_server import client, moto_server
from tests.support.s3_server import variables

runner = CliRunner()


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
