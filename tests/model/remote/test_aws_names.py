"""What AWS takes as names."""

from __future__ import annotations

import pytest
from botocore.session import Session

from djl_trtllm.model.remote import aws_names
from djl_trtllm.model.remote.aws_names import (
    ENDPOINT,
    IMAGE,
    ROLE,
    ami_problem,
    bucket_problem,
    environment_problems,
    instance_problem,
)


@pytest.mark.parametrize("name", ["a", "story", "A-1", "a--b", "9", "x" * 63])
def test_names_of_endpoints(name: str) -> None:
    assert ENDPOINT.problem("it", name) is None


@pytest.mark.parametrize("name", ["", "-a", "a-", "a_b", "a.b", "x" * 64, "\u00e9", "a\n"])
def test_what_is_no_name_of_an_endpoint(name: str) -> None:
    assert str(ENDPOINT.problem("it", name)).startswith(f"it {name!r}: expected up to 63")


def test_the_rules_are_those_of_botocores_model() -> None:
    model = Session().get_service_model("sagemaker")
    for rule, shape in ((ENDPOINT, "EndpointName"), (ROLE, "RoleArn"), (IMAGE, "ContainerImage")):
        metadata = model.shape_for(shape).metadata
        assert rule.longest == metadata["max"]
    assert model.shape_for("EnvironmentMap").metadata["max"] == 100
    assert model.shape_for("EnvironmentValue").metadata["max"] == 1024


@pytest.mark.parametrize(
    "role", ["arn:aws:iam::123456789012:role/R", "arn:aws-cn:iam::123456789012:role/service-role/A+=,.@_-b"]
)
def test_arns_of_roles(role: str) -> None:
    assert ROLE.problem("it", role) is None


@pytest.mark.parametrize("role", ["ROLE", "arn:aws:iam::12:role/R", "arn:aws:iam::123456789012:user/R"])
def test_what_is_no_arn_of_a_role(role: str) -> None:
    assert "arn:aws:iam::123456789012:role/NAME" in str(ROLE.problem("it", role))


@pytest.mark.parametrize("bucket", ["abc", "a.b-c", "sagemaker-us-east-1-123456789012", "1" * 63])
def test_buckets(bucket: str) -> None:
    assert bucket_problem(bucket) is None


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [
        ("ab", "3 to 63"),
        ("x" * 64, "3 to 63"),
        ("Upper", "lower-case"),
        ("a_b", "lower-case"),
        ("a..b", "single dots"),
        ("-ab", "3 to 63"),
        ("ab.", "3 to 63"),
        ("192.168.5.4", "not an IP address"),
        ("xn--abc", "reserves"),
        ("abc-s3alias", "reserves"),
        ("abc--x-s3", "reserves"),
    ],
)
def test_what_is_no_bucket(bucket: str, expected: str) -> None:
    assert expected in str(bucket_problem(bucket))


def test_an_instance_that_sagemaker_has_not_gets_a_suggestion() -> None:
    assert instance_problem("ml.g5.2xlarge") is None
    assert "such as ml.g5.2xlarge" in str(instance_problem("g5.2xlarge"))
    assert "did you mean ml.g5." in str(instance_problem("ml.g5.3xlarge"))
    assert "pip install --upgrade botocore" in str(instance_problem("ml.zz99.huge"))


def test_an_ami_that_sagemaker_has_not_gets_a_list() -> None:
    assert ami_problem("al2023-ami-sagemaker-inference-gpu-4-1") is None
    assert "it has al2-ami-sagemaker" in str(ami_problem("driver-580"))


def test_what_botocore_does_not_list_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws_names, "_listed", lambda shape: ())
    assert ami_problem("driver-580") is None
    assert instance_problem("ml.zz99.huge") is None


def test_an_enumeration_that_botocore_lacks_is_empty() -> None:
    assert aws_names._listed("NoSuchShape") == ()


def test_an_environment_is_checked_without_its_values_being_shown() -> None:
    assert environment_problems({"OPTION_DTYPE": "fp16", "_a1": "x" * 1024}) == []
    told = environment_problems({"1A": "secret", "B": "secret" * 1000, **{f"V{i}": "" for i in range(99)}})
    assert [line.split(":")[0] for line in told] == [
        "the variable '1A'",
        "the variable B has 6000 characters",
        "101 variables",
    ]
    assert not any("secret" in line for line in told)
