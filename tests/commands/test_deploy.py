"""`djl-trtllm deploy`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm import cli, deployment
from djl_trtllm.deployment import GPU_AMI
from tests.model.remote.test_aws_scaling import skip_without_prefix_aware
from tests.support.moto_server import client, moto_server
from tests.support.s3_server import variables

runner = CliRunner()
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/djl-trtllm:0.1"
NAMED = ("--image", IMAGE, "--role", "arn:aws:iam::123456789012:role/R")


def test_deploy_dry_run_prints_the_calls_and_sends_none(model: Path) -> None:
    result = runner.invoke(cli.app, ["deploy", str(model), *NAMED, "--dry-run", "-e", "OPTION_DTYPE=fp16"])
    assert result.exit_code == 0, result.stderr
    calls = [json.loads(text) for text in result.stdout.replace("}\n{", "}\0{").split("\0")]
    assert [call["call"] for call in calls] == ["create_model", "create_endpoint_config", "create_endpoint"]
    assert calls[0]["PrimaryContainer"]["Environment"] == {"OPTION_DTYPE": "fp16"}
    assert calls[0]["PrimaryContainer"]["ModelDataUrl"] == "s3://sagemaker-region-account/djl-trtllm/story/model.tar.gz"
    (variant,) = calls[1]["ProductionVariants"]
    assert (variant["InstanceType"], variant["InferenceAmiVersion"]) == ("ml.g5.2xlarge", GPU_AMI)


def test_routing_autoscaling_and_metrics_are_in_the_calls(model: Path) -> None:
    skip_without_prefix_aware()
    more = ("--routing", "prefix-aware", "--autoscale", "1:3", "--detailed-metrics", "-e")
    arguments = ["deploy", str(model), *NAMED, "--dry-run", *more, "OPTION_MAX_ROLLING_BATCH_SIZE=10"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.stderr
    calls = [json.loads(text) for text in result.stdout.replace("}\n{", "}\0{").split("\0")]
    assert [call["call"] for call in calls[3:]] == ["register_scalable_target", "put_scaling_policy"]
    assert calls[1]["ProductionVariants"][0]["RoutingConfig"] == {"RoutingStrategy": "PREFIX_AWARE"}
    assert "MetricsConfig" in calls[1]
    assert calls[4]["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 7.0
    result = runner.invoke(cli.app, [*arguments, "--no-wait"])
    assert (result.exit_code, "leave out --no-wait" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "ami"),
    [
        (("--instance-type", "ml.c7i.4xlarge"), None),
        (("--ami-version", "none"), None),
        (("--ami-version", "al2-ami-sagemaker-inference-gpu-3-1"), "al2-ami-sagemaker-inference-gpu-3-1"),
    ],
)
def test_the_ami_is_that_of_the_instance_unless_it_is_given(
    model: Path, arguments: tuple[str, ...], ami: str | None
) -> None:
    result = runner.invoke(cli.app, ["deploy", str(model), *NAMED, "--dry-run", *arguments])
    configuration = json.loads(result.stdout.replace("}\n{", "}\0{").split("\0")[1])
    assert configuration["ProductionVariants"][0].get("InferenceAmiVersion") == ami


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--name", "my_story"), "the endpoint 'my_story': expected up to 63"),
        (("--bucket", "My_Bucket"), "the bucket 'My_Bucket': expected 3 to 63 lower-case"),
        (("--instance-type", "ml.g5.2xlrage"), "did you mean ml.g5.2xlarge"),
        (
            ("--ami-version", "al2023-ami-sagemaker-inference-gpu-4"),
            "did you mean al2023-ami-sagemaker-inference-gpu-4-1",
        ),
        (("--role", "admin"), "the role 'admin': expected the ARN"),
        (("-e", "MY-NAME=1"), "the variable 'MY-NAME'"),
        (("--routing", "nearest"), "--routing nearest: expected prefix-aware"),
        (("--autoscale", "3:1"), "--autoscale 3:1: MAX is '1'"),
    ],
)
def test_what_aws_would_refuse_is_reported_before_anything_is_packed_or_sent(
    model: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr(deployment, "_client", lambda: pytest.fail("AWS was asked"))
    monkeypatch.setattr(deployment, "upload_model", lambda *given: pytest.fail("the model was uploaded"))
    result = runner.invoke(cli.app, ["deploy", str(model), *NAMED, *arguments])
    assert result.exit_code == 1
    assert expected in result.stderr


def test_what_the_server_would_refuse_is_reported_before_anything_is_sent(model: Path) -> None:
    (model / "serving.properties").write_text("option.max_input_len=many\n")
    result = runner.invoke(cli.app, ["deploy", str(model), *NAMED, "--dry-run"])
    assert result.exit_code == 1
    assert "option.max_input_len=many" in result.stderr
    result = runner.invoke(cli.app, ["deploy", str(model / "nowhere"), *NAMED, "--dry-run"])
    assert result.exit_code == 1
    assert "neither a model directory nor" in result.stderr


def test_the_name_of_an_endpoint_follows_from_the_directorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("a" * 62 + "_b")
    folder.mkdir()
    (folder / "serving.properties").write_text("option.model_id=acme/story\n")
    monkeypatch.chdir(folder)
    result = runner.invoke(cli.app, ["deploy", ".", *NAMED, "--dry-run"])
    assert result.exit_code == 0, result.stderr
    assert f'"EndpointName": "{"a" * 62}"' in result.stdout


def test_a_name_in_use_is_reported_before_the_model_is_uploaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server() as url:
        arguments = ["deploy", str(model), *NAMED, "--instance-type", "ml.g4dn.xlarge"]
        made = runner.invoke(cli.app, arguments, env=variables(url))
        assert made.exit_code == 0, made.stderr
        monkeypatch.setattr(deployment, "upload_model", lambda *given: pytest.fail("the model was uploaded"))
        again = runner.invoke(cli.app, arguments, env=variables(url))
        assert again.exit_code == 1
        assert "story is already the name of an endpoint" in again.stderr


def test_deploy_says_what_is_missing(model: Path) -> None:
    result = runner.invoke(cli.app, ["deploy", str(model)], env={"DJL_TRTLLM_IMAGE": "", "SAGEMAKER_ROLE": ""})
    assert result.exit_code == 1
    assert "--image" in result.stderr and "--role" in result.stderr


def test_deploy_packs_uploads_and_makes_an_endpoint_and_delete_removes_it(model: Path) -> None:
    with moto_server() as url:
        settings = variables(url)
        arguments = [*NAMED, "--instance-type", "ml.g4dn.xlarge"]
        made = runner.invoke(cli.app, ["deploy", str(model), *arguments], env=settings)
        assert made.exit_code == 0, made.stderr
        assert client(url, "sagemaker").describe_endpoint(EndpointName="story")["EndpointStatus"] == "InService"
        gone = runner.invoke(cli.app, ["deploy", "--delete", "story"], env=settings)
        assert gone.exit_code == 0, gone.stderr
        assert client(url, "sagemaker").list_endpoints()["Endpoints"] == []
