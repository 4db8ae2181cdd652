"""Endpoints, against moto's SageMaker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from djl_trtllm import deployment
from djl_trtllm.deployment import (
    GPU_AMI,
    Deployment,
    default_ami,
    default_bucket,
    delete,
    deploy,
    require_unused,
    upload_model,
)
from djl_trtllm.errors import DeploymentError
from djl_trtllm.model.remote.aws_scaling import Autoscaling, Routing
from djl_trtllm.model.remote.s3 import S3Address
from tests.model.remote.test_aws_scaling import skip_without_prefix_aware, validate
from tests.support.moto_server import client, moto_server
from tests.support.s3_server import variables

ROLE = "arn:aws:iam::123456789012:role/SageMakerRole"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/djl-trtllm:0.1"
STORY = Deployment(
    "story", IMAGE, ROLE, S3Address.parse("s3://models/story/model.tar.gz"), "ml.g4dn.2xlarge", environment={"A": "b"}
)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto_server() as url:
        for name, value in variables(url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.02)
        yield url


def test_a_deployment_makes_model_configuration_and_endpoint(aws: str) -> None:
    lines: list[str] = []
    deploy(STORY, lines.append, wait_seconds=30)
    sagemaker = client(aws, "sagemaker")
    container = sagemaker.describe_model(ModelName="story")["PrimaryContainer"]
    assert container["Image"] == IMAGE
    assert container["ModelDataUrl"] == "s3://models/story/model.tar.gz"
    assert container["Environment"] == {"A": "b"}
    (variant,) = sagemaker.describe_endpoint_config(EndpointConfigName="story")["ProductionVariants"]
    assert variant["InstanceType"] == "ml.g4dn.2xlarge"
    assert sagemaker.describe_endpoint(EndpointName="story")["EndpointStatus"] == "InService"
    assert any("is in service" in line for line in lines)


def test_the_machines_driver_comes_with_the_ami_that_was_asked_for() -> None:
    def variant(deployment: Deployment) -> dict[str, object]:
        _, configuration, _ = deployment.calls()
        (made,) = configuration.arguments["ProductionVariants"]
        return dict(made)

    asked = variant(replace(STORY, ami_version="al2023-ami-sagemaker-inference-gpu-4-1"))
    assert asked == {**variant(STORY), "InferenceAmiVersion": "al2023-ami-sagemaker-inference-gpu-4-1"}
    assert "InferenceAmiVersion" not in variant(STORY)


def test_deleting_removes_all_three(aws: str) -> None:
    deploy(STORY, lambda line: None)
    delete("story", lambda line: None)
    sagemaker = client(aws, "sagemaker")
    assert sagemaker.list_endpoints()["Endpoints"] == []
    assert sagemaker.list_endpoint_configs()["EndpointConfigs"] == []
    assert sagemaker.list_models()["Models"] == []


def test_what_is_left_of_a_deployment_is_deleted_too(aws: str) -> None:
    deploy(STORY, lambda line: None)
    client(aws, "sagemaker").delete_endpoint(EndpointName="story")
    delete("story", lambda line: None)
    assert client(aws, "sagemaker").list_models()["Models"] == []


def test_deleting_what_is_not_there_is_an_error(aws: str) -> None:
    with pytest.raises(DeploymentError, match="there is no endpoint, endpoint configuration or model story"):
        delete("story", lambda line: None)


def test_what_was_made_before_a_refusal_is_removed_again(aws: str) -> None:
    # moto does not know this one.
    broken = Deployment("story", IMAGE, ROLE, STORY.model_data, "ml.p6-b300.48xlarge")
    with pytest.raises(DeploymentError, match="create_endpoint_config story: AWS refused"):
        deploy(broken, lambda line: None)
    assert client(aws, "sagemaker").list_models()["Models"] == []


def test_a_prefix_is_copied_as_it_is_and_an_archive_is_opened() -> None:
    prefix = Deployment("story", IMAGE, ROLE, S3Address.parse("s3://models/story"), "ml.g5.xlarge")
    container = prefix.calls()[0].arguments["PrimaryContainer"]
    assert container["ModelDataSource"]["S3DataSource"] == {
        "S3Uri": "s3://models/story/",
        "S3DataType": "S3Prefix",
        "CompressionType": "None",
    }
    assert "ModelDataUrl" not in container
    assert "ModelDataUrl" in STORY.calls()[0].arguments["PrimaryContainer"]


def test_a_whole_bucket_is_a_prefix_too() -> None:
    whole = replace(STORY, model_data=S3Address.parse("s3://models"))
    source = whole.calls()[0].arguments["PrimaryContainer"]["ModelDataSource"]
    assert source["S3DataSource"]["S3Uri"] == "s3://models/"


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 64, "under_score"])
def test_a_name_sagemaker_does_not_take_is_reported_before_any_call(name: str) -> None:
    with pytest.raises(DeploymentError, match=r"the endpoint .*: expected up to 63 letters"):
        Deployment(name, IMAGE, ROLE, STORY.model_data, "ml.g5.xlarge").calls()
    with pytest.raises(DeploymentError, match=r"the endpoint .*: expected up to 63 letters"):
        delete(name, lambda line: None)


def test_everything_that_aws_would_refuse_is_reported_at_once() -> None:
    wrong = Deployment(
        "my_story", "", "admin", S3Address("My_Bucket", "k"), "g5.2xlarge", 1, {"A-B": "c"}, ami_version="gpu-4"
    )
    with pytest.raises(DeploymentError) as caught:
        wrong.check()
    told = str(caught.value).split("; ")
    names = ("endpoint 'my_story'", "image ''", "role 'admin'", "bucket 'My_Bucket'", "type 'g5.2xlarge'")
    assert [name in line for name, line in zip((*names, "version 'gpu-4'", "variable 'A-B'"), told, strict=True)]


@pytest.mark.parametrize(
    ("instance", "ami"),
    [
        ("ml.g5.2xlarge", GPU_AMI),
        ("ml.g4dn.xlarge", GPU_AMI),
        ("ml.g6e.12xlarge", GPU_AMI),
        ("ml.p5en.48xlarge", GPU_AMI),
        ("ml.p6-b200.48xlarge", GPU_AMI),
        ("ml.p3.2xlarge", None),
        ("ml.c7i.4xlarge", None),
        ("ml.inf2.xlarge", None),
    ],
)
def test_instances_with_a_gpu_for_cuda_13_get_the_ami_with_its_driver(instance: str, ami: str | None) -> None:
    assert default_ami(instance) == ami
    replace(STORY, instance_type=instance, ami_version=ami).check()


def test_a_name_in_use_is_reported_with_what_has_it(aws: str) -> None:
    require_unused("story")
    deploy(STORY, lambda line: None)
    client(aws, "sagemaker").delete_endpoint(EndpointName="story")
    with pytest.raises(
        DeploymentError, match=r"already the name of an endpoint configuration and of a model in .*--del"
    ):
        require_unused("story")


def test_an_archive_goes_to_sagemakers_own_bucket_by_default(aws: str, tmp_path: Path) -> None:
    (tmp_path / "model.tar.gz").write_bytes(b"an archive")
    address = upload_model(tmp_path / "model.tar.gz", None, "story", lambda line: None)
    assert address.bucket == default_bucket() == "sagemaker-us-east-1-123456789012"
    stored = client(aws).get_object(Bucket=address.bucket, Key=address.key)["Body"].read()
    assert stored == b"an archive"


def test_without_region_or_credentials_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DeploymentError, match="set AWS_REGION"):
        deploy(STORY, lambda line: None)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(DeploymentError, match="no AWS credentials"):
        deploy(STORY, lambda line: None)


def test_routing_and_metrics_are_in_the_configuration() -> None:
    plan = replace(STORY, routing=Routing.parse("prefix-aware:2048"), detailed_metrics=True)
    skip_without_prefix_aware()
    model, configuration, _ = plan.calls()
    validate(model)
    validate(configuration)
    assert model.arguments["PrimaryContainer"]["ContainerMetricsConfig"] == {
        "MetricsEndpoints": [{"MetricsEndpointPath": "/metrics"}]
    }
    (variant,) = configuration.arguments["ProductionVariants"]
    assert variant["RoutingConfig"]["PrefixAwareRoutingConfig"] == {"PrefixLength": 2048}
    assert configuration.arguments["MetricsConfig"] == {
        "EnableEnhancedMetrics": True,
        "EnableDetailedObservability": True,
    }
    plain_model, plain, _ = STORY.calls()
    assert "ContainerMetricsConfig" not in plain_model.arguments["PrimaryContainer"]
    assert "MetricsConfig" not in plain.arguments and "RoutingConfig" not in plain.arguments["ProductionVariants"][0]
    with pytest.raises(DeploymentError, match="the routing 'NEAREST' is not one"):
        replace(STORY, routing=Routing("NEAREST")).check()


@pytest.mark.parametrize(("count", "initial"), [(1, 2), (3, 3), (9, 4)])
def test_an_endpoint_begins_within_the_bounds_of_its_autoscaling(count: int, initial: int) -> None:
    plan = replace(STORY, instance_count=count, autoscaling=Autoscaling(2, 4, 5))
    (variant,) = plan.calls()[1].arguments["ProductionVariants"]
    assert variant["InitialInstanceCount"] == initial


def test_autoscaling_begins_when_the_endpoint_is_in_service_and_ends_with_it(aws: str) -> None:
    plan = replace(STORY, autoscaling=Autoscaling(1, 4, 45))
    with pytest.raises(DeploymentError, match="--autoscale needs an endpoint in service"):
        deploy(plan, lambda line: None)
    lines: list[str] = []
    deploy(plan, lines.append, wait_seconds=30)
    assert lines[-2:] == ["register_scalable_target story", "put_scaling_policy story"]
    scaling = client(aws, "application-autoscaling")
    (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert (target["ResourceId"], target["MaxCapacity"]) == ("endpoint/story/variant/AllTraffic", 4)
    (policy,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    assert policy["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 45.0
    lines.clear()
    delete("story", lines.append)
    assert lines[0] == "deregister_scalable_target story"
    assert scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"] == []
