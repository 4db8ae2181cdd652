"""How an endpoint of SageMaker spreads requests over its instances, and how many of them it has.

The names are those of botocore's models of SageMaker and application-autoscaling (1.44.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from djl_trtllm.errors import DeploymentError
from djl_trtllm.model.remote import aws_names

VARIANT = "AllTraffic"
AUTOSCALING = "application-autoscaling"
_PREFIX_AWARE = "PREFIX_AWARE"
_SHORTEST_PREFIX, _LONGEST_PREFIX = 1024, 65_536
_MOST_INSTANCES, _MOST_CONCURRENT = 10_000, 100_000
_OF_A_FULL_BATCH = 0.7
"""Above this share of its places, another instance is started before requests have to wait."""


class AwsCall(NamedTuple):
    """One call of a client of boto3."""

    method: str
    arguments: Mapping[str, Any]
    service: str = "sagemaker"


class Routing(NamedTuple):
    """How SageMaker chooses an instance. `prefix`: bytes of a request that decide, if the strategy is PREFIX_AWARE."""

    strategy: str
    prefix: int | None = None

    @classmethod
    def parse(cls, text: str) -> Routing:
        """Read `least-outstanding`, `random` or `prefix-aware[:BYTES]`. Raises DeploymentError."""
        name, colon, prefix = text.strip().lower().replace("_", "-").partition(":")
        strategies = {
            "least-outstanding": "LEAST_OUTSTANDING_REQUESTS",
            "least-outstanding-requests": "LEAST_OUTSTANDING_REQUESTS",
            "random": "RANDOM",
            "prefix-aware": _PREFIX_AWARE,
        }
        strategy = strategies.get(name)
        if strategy is None or (colon and strategy != _PREFIX_AWARE):
            raise DeploymentError(
                f"--routing {text}: expected prefix-aware, prefix-aware:BYTES, least-outstanding or random"
            )
        if not colon:
            return cls(strategy)
        return cls(strategy, _whole(prefix, f"--routing {text}", "BYTES", _SHORTEST_PREFIX, _LONGEST_PREFIX))

    def problem(self) -> str | None:
        """Why the installed boto3 cannot ask for it; None if it can."""
        return aws_names.routing_problem(self.strategy)

    def config(self) -> dict[str, Any]:
        """SageMaker's RoutingConfig."""
        config: dict[str, Any] = {"RoutingStrategy": self.strategy}
        return config if self.prefix is None else config | {"PrefixAwareRoutingConfig": {"PrefixLength": self.prefix}}


class Autoscaling(NamedTuple):
    """From `least` to `most` instances, with as many requests at the same time on each of them as `concurrency`."""

    least: int
    most: int
    concurrency: int

    @classmethod
    def parse(cls, text: str, batch_size: int) -> Autoscaling:
        """Read `MIN:MAX[:CONCURRENCY]`; by default, 0.7 of `batch_size` are concurrent. Raises DeploymentError."""
        what, parts = f"--autoscale {text}", text.split(":")
        if len(parts) not in (2, 3):
            raise DeploymentError(f"{what}: expected MIN:MAX or MIN:MAX:CONCURRENCY, such as 1:4:45")
        least = _whole(parts[0], what, "MIN", 1, _MOST_INSTANCES)
        most = _whole(parts[1], what, "MAX", least, _MOST_INSTANCES)
        default = max(1, round(_OF_A_FULL_BATCH * batch_size))
        return cls(least, most, _whole(parts[2], what, "CONCURRENCY", 1, _MOST_CONCURRENT) if parts[2:] else default)

    def calls(self, endpoint: str) -> list[AwsCall]:
        """The calls that set it up for an endpoint in service."""
        target = scalable(endpoint)
        metric = {"PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"}
        policy = {
            "PolicyName": f"{endpoint}-concurrency",
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": {
                "TargetValue": float(self.concurrency),
                "PredefinedMetricSpecification": metric,
            },
        }
        limits = {"MinCapacity": self.least, "MaxCapacity": self.most}
        return [
            AwsCall("register_scalable_target", {**target, **limits}, AUTOSCALING),
            AwsCall("put_scaling_policy", {**target, **policy}, AUTOSCALING),
        ]


def scalable(endpoint: str) -> dict[str, str]:
    """What application-autoscaling scales."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{endpoint}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def _whole(text: str, what: str, name: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise DeploymentError(f"{what}: {name} is {text!r}, expected a whole number from {low} to {high}")
    return int(text)
