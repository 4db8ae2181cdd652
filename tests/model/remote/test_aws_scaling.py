"""Routing and autoscaling of endpoints: what the command line says, and the calls of AWS for it."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.errors import DeploymentError
from djl_trtllm.model.remote.aws_scaling import Autoscaling, AwsCall, Routing


def validate(call: AwsCall) -> None:
    """What botocore checks of a call before it sends it: names, types and ranges."""
    from botocore.session import Session
    from botocore.validate import ParamValidator

    model = Session().get_service_model(call.service)
    name = "".join(part.capitalize() for part in call.method.split("_"))
    report = ParamValidator().validate(call.arguments, model.operation_model(name).input_shape)
    assert not report.has_errors(), report.generate_report()


def skip_without_prefix_aware() -> None:
    """SageMaker's strategy of 2026, which older versions of botocore do not know."""
    if problem := Routing("PREFIX_AWARE").problem():
        pytest.skip(problem)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("random", {"RoutingStrategy": "RANDOM"}),
        ("least-outstanding", {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}),
        ("LEAST_OUTSTANDING_REQUESTS", {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}),
        ("prefix-aware", {"RoutingStrategy": "PREFIX_AWARE"}),
        (
            "prefix-aware:1024",
            {"RoutingStrategy": "PREFIX_AWARE", "PrefixAwareRoutingConfig": {"PrefixLength": 1024}},
        ),
        (
            "prefix-aware:65536",
            {"RoutingStrategy": "PREFIX_AWARE", "PrefixAwareRoutingConfig": {"PrefixLength": 65536}},
        ),
    ],
)
def test_a_routing_is_sagemakers(text: str, config: dict[str, Any]) -> None:
    routing = Routing.parse(text)
    assert routing.config() == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kv-aware", "expected prefix-aware, prefix-aware:BYTES, least-outstanding or random"),
        ("", "expected prefix-aware"),
        ("random:5", "expected prefix-aware"),
        ("prefix-aware:", "BYTES is '', expected a whole number from 1024 to 65536"),
        ("prefix-aware:1023", "BYTES is '1023'"),
        ("prefix-aware:65537", "BYTES is '65537'"),
        ("prefix-aware:-2000", "BYTES is '-2000'"),
    ],
)
def test_another_routing_is_refused(text: str, expected: str) -> None:
    with pytest.raises(DeploymentError, match=f"--routing {text}: .*{expected}"):
        Routing.parse(text)


def test_a_routing_that_the_installed_botocore_lacks_is_named() -> None:
    assert Routing("RANDOM").problem() is None
    problem = Routing("NEAREST").problem()
    assert problem is not None and "the routing 'NEAREST' is not one that botocore" in problem


def test_autoscaling_has_a_target_and_a_policy() -> None:
    calls = Autoscaling.parse("1:4:45", 64).calls("story")
    for call in calls:
        validate(call)
    target, policy = calls
    assert target.method == "register_scalable_target"
    assert (target.arguments["MinCapacity"], target.arguments["MaxCapacity"]) == (1, 4)
    assert target.arguments["ResourceId"] == policy.arguments["ResourceId"] == "endpoint/story/variant/AllTraffic"
    tracking = policy.arguments["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["TargetValue"] == 45.0
    metric = tracking["PredefinedMetricSpecification"]["PredefinedMetricType"]
    skip_without_prefix_aware()
    from botocore.session import Session

    assert metric in Session().get_service_model("application-autoscaling").shape_for("MetricType").metadata["enum"]


@pytest.mark.parametrize(("batch_size", "concurrency"), [(64, 45), (32, 22), (1, 1)])
def test_the_concurrency_follows_from_the_batch(batch_size: int, concurrency: int) -> None:
    assert Autoscaling.parse("1:2", batch_size) == Autoscaling(1, 2, concurrency)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", "expected MIN:MAX or MIN:MAX:CONCURRENCY"),
        ("1:2:3:4", "expected MIN:MAX or"),
        ("0:2", "MIN is '0'"),
        ("3:2", "MAX is '2', expected a whole number from 3 to 10000"),
        ("1:x", "MAX is 'x'"),
        ("1:2:0", "CONCURRENCY is '0'"),
    ],
)
def test_other_numbers_are_refused(text: str, expected: str) -> None:
    with pytest.raises(DeploymentError, match=f"--autoscale {text}: .*{expected}"):
        Autoscaling.parse(text, 64)
