"""The template of `serving/sagemaker`: CloudFormation's schemas, SageMaker's own model of its calls, and its modes.

cfn-lint compares every property with the schemas of CloudFormation's resources, in all combinations of conditions. For
some sets of parameters the template is also resolved here, and what CloudFormation would send to SageMaker is compared
with the calls of the SDK, whose parameters have the same names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator

from djl_trtllm.config import Options
from djl_trtllm.model.archive import parameters_file
from tests.support.tables import by_rows

ROOT = Path(__file__).parents[2]
FILE = ROOT / "serving" / "sagemaker" / "endpoint.yaml"
PAGE = ROOT / "docs" / "sagemaker.md"
Object = dict[str, Any]

GIVEN = {
    "Image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/djl-trtllm:0.1",
    "RoleArn": "arn:aws:iam::123456789012:role/SageMakerRole",
    "ModelPrefix": "s3://bucket/story",
    "ModelVersion": "0123456789abcdef",
}
COMPONENTS = {"Mode": "components", "MinCapacity": "0", "MaxCapacity": "4", "Accelerators": "4"}
ASYNC = {"Mode": "async", "MinCapacity": "0", "MaxCapacity": "2", "AsyncOutput": "s3://bucket/out"}
NETWORK = {"Subnets": "subnet-1,subnet-2", "SecurityGroups": "sg-1", "StorageKey": "key-1", "DataKey": "key-2"}
CASES: dict[str, dict[str, str]] = {
    "defaults": {},
    "a fleet": {"InstanceCount": "4", "MaxCapacity": "8", "Routing": "PREFIX_AWARE", **NETWORK},
    "captured": {"CaptureOutput": "s3://bucket/captured", "CapturePercentage": "10", **NETWORK},
    "without a GPU": {"InstanceType": "ml.c7i.4xlarge", "AmiVersion": ""},
    "components": {**COMPONENTS, **NETWORK},
    "adapters": {**COMPONENTS, "Adapters": "dutch,french", "AdapterPrefix": "s3://bucket/adapters"},
    "async": {**ASYNC, **NETWORK},
}


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "Fn::Equals": lambda each: str(each[0]) == str(each[1]),
    "Fn::Not": lambda each: not each[0],
    "Fn::And": all,
    "Fn::Or": any,
    "Fn::Join": lambda each: each[0].join(each[1]),
    "Fn::Split": lambda each: each[1].split(each[0]),
    "Fn::Select": lambda each: each[1][int(each[0])],
    "Fn::Contains": lambda each: each[1] in each[0],
    "Fn::EachMemberEquals": lambda each: all(member == each[1] for member in each[0]),
}


@cache
def template() -> Object:
    from cfnlint.decode import cfn_yaml  # a second, which collecting the tests does without

    found: Object = cfn_yaml.load(str(FILE))
    return found


class Absent:
    """AWS::NoValue."""


class Template:
    """The template with values for its parameters, as CloudFormation resolves it."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.text = template()
        values: dict[str, Any] = {name: each.get("Default") for name, each in self.text["Parameters"].items()}
        values |= {**GIVEN, **given}
        assert None not in values.values()
        lists = [name for name, each in self.text["Parameters"].items() if each["Type"] == "CommaDelimitedList"]
        numbers = [name for name, each in self.text["Parameters"].items() if each["Type"] == "Number"]
        self.values = {
            **values,
            **{name: values[name].split(",") for name in lists},
            **{name: int(values[name]) for name in numbers},
            "AWS::StackName": "story",
            "AWS::Region": "us-east-1",
            "AWS::URLSuffix": "amazonaws.com",
            "AWS::NoValue": Absent,
        }

    def condition(self, name: str) -> bool:
        return bool(self._resolved(self.text["Conditions"][name]))

    def broken_rules(self) -> list[str]:
        """Return the reasons for which CloudFormation refuses the parameters."""
        return [
            assertion["AssertDescription"]
            for rule in self.text["Rules"].values()
            if self._resolved(rule["RuleCondition"])
            for assertion in rule["Assertions"]
            if not self._resolved(assertion["Assert"])
        ]

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, list):
            return [each for each in map(self._resolved, value) if each is not Absent]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((key, argument),) = value.items()
            if key in ("Ref", "Condition") or key.startswith("Fn::"):
                return self._function(key, argument)
        found = {key: self._resolved(each) for key, each in value.items()}
        return {key: each for key, each in found.items() if each is not Absent}

    def _function(self, name: str, argument: Any) -> Any:
        if name == "Ref":
            return self.values.get(argument, f"arn:aws:sagemaker:us-east-1:123456789012:x/{argument}")
        if name == "Condition":
            return self.condition(argument)
        if name == "Fn::If":
            return self._resolved(argument[1] if self.condition(argument[0]) else argument[2])
        if name == "Fn::GetAtt":
            resource, attribute = argument.split(".") if isinstance(argument, str) else argument
            return "story" if attribute == "EndpointName" else f"{resource}-1"
        if name == "Fn::Sub":
            return re.sub(r"\$\{([\w:.]+)\}", lambda found: str(self._named(found[1])), argument)
        return FUNCTIONS[name](self._resolved(argument))

    def _named(self, name: str) -> Any:
        return self._function("Fn::GetAtt", name) if "." in name else self._function("Ref", name)

    def resources(self) -> dict[str, Object]:
        """The properties of the resources that there are."""
        found: dict[str, Object] = {}
        for name, each in self.text["Resources"].items():
            if name.startswith("Fn::ForEach::"):
                variable, values, body = each
                ((pattern, resource),) = body.items()
                for value in self._resolved(values):
                    self.values[variable] = value
                    found |= self._one(pattern.replace(f"${{{variable}}}", value), resource)
            else:
                found |= self._one(name, each)
        return found

    def _one(self, name: str, resource: Object) -> dict[str, Object]:
        if "Condition" in resource and not self.condition(resource["Condition"]):
            return {}
        return {name: self._resolved(resource["Properties"])}


def resources(**given: str) -> dict[str, Object]:
    return Template(given).resources()


CALLS = {
    "Model": ("sagemaker", "CreateModel"),
    "EndpointConfig": ("sagemaker", "CreateEndpointConfig"),
    "Component": ("sagemaker", "CreateInferenceComponent"),
    "Adapterdutch": ("sagemaker", "CreateInferenceComponent"),
    "ServerErrors": ("cloudwatch", "PutMetricAlarm"),
    "WithoutInstance": ("cloudwatch", "PutMetricAlarm"),
    "ScalableTarget": ("application-autoscaling", "RegisterScalableTarget"),
}
"""The call that makes a resource."""
NAMES = {
    "Model": "ModelName",
    "EndpointConfig": "EndpointConfigName",
    "ServerErrors": "AlarmName",
    "WithoutInstance": "AlarmName",
}
"""Properties whose names CloudFormation makes."""
ONLY_OF_UPDATES = ("DeploymentConfig",)


@cache
def service_model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)


def problems(service: str, operation: str, parameters: Object) -> str:
    shape = service_model(service).operation_model(operation).input_shape
    return str(ParamValidator().validate(parameters, shape).generate_report())


def test_the_linter_finds_nothing() -> None:
    from cfnlint.api import ManualArgs, lint_file

    assert [str(found) for found in lint_file(FILE, ManualArgs(regions=["us-east-1"]))] == []


@by_rows("case", CASES)
def test_the_calls_have_the_parameters_of_the_sdk(case: str) -> None:
    found = resources(**CASES[case])
    for name, (service, operation) in CALLS.items():
        if name in found:
            named = {NAMES[name]: "made"} if name in NAMES else {}
            parameters = {key: each for key, each in found[name].items() if key not in ONLY_OF_UPDATES}
            assert problems(service, operation, {**named, **parameters}) == "", name
    assert problems("sagemaker", "UpdateEndpoint", found["Endpoint"]) == ""
    if "Component" in found:
        updated = {key: each for key, each in found["Component"].items() if key not in ("EndpointName", "VariantName")}
        assert problems("sagemaker", "UpdateInferenceComponent", updated) == ""


def test_an_instance_has_the_driver_and_the_time_that_the_image_needs() -> None:
    found = resources()
    (variant,) = found["EndpointConfig"]["ProductionVariants"]
    assert variant["InferenceAmiVersion"] == "al2023-ami-sagemaker-inference-gpu-4-1"
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 3600
    assert found["Model"]["PrimaryContainer"]["ModelDataUrl"] == "s3://bucket/story/0123456789abcdef.tar.gz"
    assert "ScalableTarget" not in found
    (without,) = resources(AmiVersion="")["EndpointConfig"]["ProductionVariants"]
    assert "InferenceAmiVersion" not in without


@pytest.mark.parametrize(
    ("case", "resource", "dimension", "metric"),
    [
        ("a fleet", "endpoint/story/variant/AllTraffic", "variant:DesiredInstanceCount", "VariantConcurrentRequests"),
        ("components", "x/Component", "inference-component:DesiredCopyCount", "InferenceComponentConcurrentRequests"),
        ("async", "endpoint/story/variant/AllTraffic", "variant:DesiredInstanceCount", "ApproximateBacklogSize"),
    ],
)
def test_each_mode_scales_by_its_own_metric(case: str, resource: str, dimension: str, metric: str) -> None:
    found = resources(**CASES[case], TargetConcurrency="179")
    target = found["ScalableTarget"]
    assert (target["ResourceId"], target["ScalableDimension"]) == (resource, f"sagemaker:{dimension}")
    policy = found["Scaling"]["TargetTrackingScalingPolicyConfiguration"]
    assert policy["TargetValue"] == 179
    assert metric in str(policy)


def test_only_from_zero_an_alarm_starts_the_first_instance() -> None:
    assert "WithoutInstance" not in resources(**CASES["a fleet"])
    component, queue = (resources(**CASES[case])["WithoutInstance"] for case in ("components", "async"))
    assert (component["MetricName"], queue["MetricName"]) == (
        "NoCapacityInvocationFailures",
        "HasBacklogWithoutCapacity",
    )
    assert component["Dimensions"] == [{"Name": "InferenceComponentName", "Value": "story-model"}]
    assert queue["Dimensions"] == [{"Name": "EndpointName", "Value": "story"}]
    (variant,) = resources(**CASES["components"])["EndpointConfig"]["ProductionVariants"]
    assert variant["ManagedInstanceScaling"] == {"Status": "ENABLED", "MinInstanceCount": 0, "MaxInstanceCount": 4}


def test_an_update_is_rolled_back_by_the_alarm_in_every_mode() -> None:
    for case in CASES:
        found = resources(**CASES[case])
        updated = found["Component"] if "Component" in found else found["Endpoint"]
        (alarm,) = updated["DeploymentConfig"]["AutoRollbackConfiguration"]["Alarms"]
        assert alarm["AlarmName"].endswith("ServerErrors"), case
    # An update does not undo what scaling has chosen.
    assert resources()["Endpoint"]["RetainAllVariantProperties"] is True


@pytest.mark.parametrize(
    ("given", "rolls"),
    [
        ({}, False),
        ({"InstanceCount": "2"}, True),
        # Scaling may have left fewer instances than there were at first, or more.
        ({"InstanceCount": "4", "MaxCapacity": "8"}, False),
        ({"MinCapacity": "2", "MaxCapacity": "8"}, True),
        ({"InstanceCount": "2", **ASYNC}, False),
    ],
)
def test_an_update_rolls_where_there_are_always_two_instances(given: dict[str, str], rolls: bool) -> None:
    config = resources(**given)["Endpoint"]["DeploymentConfig"]
    assert ("RollingUpdatePolicy" in config, "BlueGreenUpdatePolicy" in config) == (rolls, not rolls)


def test_instances_of_components_scale_only_where_the_copies_do() -> None:
    for given, scales in ({}, False), ({"MaxCapacity": "2"}, True):
        found = resources(Mode="components", InstanceCount="2", **given)
        (variant,) = found["EndpointConfig"]["ProductionVariants"]
        assert ("ManagedInstanceScaling" in variant, "ScalableTarget" in found) == (scales, scales)


def test_adapters_are_components_of_the_model() -> None:
    found = resources(**CASES["adapters"])
    assert found["Adapterfrench"]["Specification"] == {
        "BaseInferenceComponentName": "Component",
        "Container": {"ArtifactUrl": "s3://bucket/adapters/french.tar.gz"},
    }
    assert found["Model"]["PrimaryContainer"]["Environment"]["OPTION_ENABLE_LORA"] == "true"
    assert not any(name.startswith("Adapter") for name in resources(**CASES["components"]))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"MinCapacity": "0"}, "MinCapacity"),
        ({"Mode": "async"}, "AsyncOutput"),
        ({"Mode": "components", "Adapters": "dutch,french"}, "AdapterPrefix"),
        ({"Subnets": "subnet-1,subnet-2"}, "SecurityGroups"),
    ],
)
def test_parameters_that_need_others_are_refused_before_anything_is_made(given: dict[str, str], named: str) -> None:
    (broken,) = Template(given).broken_rules()
    assert named in broken


@by_rows("case", CASES)
def test_parameters_that_fit_break_no_rule(case: str) -> None:
    assert Template(CASES[case]).broken_rules() == []


def test_parameters_of_an_archive_are_parameters_of_the_template() -> None:
    declared = template()["Parameters"]
    assert {"ModelVersion", "TargetConcurrency", "Accelerators"} <= set(declared)
    # The default is that of a directory without options.
    assert declared["TargetConcurrency"]["Default"] == round(0.7 * Options().max_rolling_batch_size)
    assert all(each["Description"] for each in declared.values())
    assert parameters_file(Path("out/model.tar.gz")) == Path("out/model.parameters.json")


def test_the_page_names_parameters_of_the_template() -> None:
    declared = template()["Parameters"]
    page = PAGE.read_text()
    (given,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert set(yaml.safe_load(given)["Parameters"]) <= set(declared)
    before, _, _ = page.partition("## Metrics")
    named = set(re.findall(r"`([A-Z][A-Za-z]+)(?:=[^`(\"]*)?`", before)) - {"Component"}
    assert len(named) > 12
    assert named <= {*declared, "NoCapacityInvocationFailures", "HasBacklogWithoutCapacity"}
