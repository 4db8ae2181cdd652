"""What AWS takes as a name, checked before anything is sent: a refusal after an upload of hours comes late.

The patterns are those of botocore's model of SageMaker (1.44.5), and S3's rules for buckets
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_IP_ADDRESS = re.compile(r"(\d+\.){3}\d+")
_RESERVED = re.compile(r"(xn--|sthree-|amzn-s3-demo-).*|.*(-s3alias|--ol-s3|\.mrap|--x-s3|--table-s3)")
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,1023}")
_MOST_VARIABLES = 100
_LONGEST_VALUE = 1024


class NameRule(NamedTuple):
    """A pattern and a length, and the same in words."""

    pattern: re.Pattern[str]
    longest: int
    expected: str

    def problem(self, what: str, value: str) -> str | None:
        """What is wrong with a value; None: nothing."""
        if len(value) <= self.longest and self.pattern.fullmatch(value):
            return None
        return f"{what} {value!r}: expected {self.expected}"


ENDPOINT = NameRule(
    re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"),
    63,
    "up to 63 letters, digits and hyphens, the first and last of them no hyphen",
)
ROLE = NameRule(
    re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@/-]+"),
    2048,
    "the ARN of a role, arn:aws:iam::123456789012:role/NAME",
)
IMAGE = NameRule(re.compile(r"\S+"), 255, "an image in ECR, ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG")
_INSTANCE = NameRule(re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+"), 63, "an instance of SageMaker, such as ml.g5.2xlarge")


def bucket_problem(bucket: str) -> str | None:
    """Why S3 has no bucket of this name; None if it can have one."""
    what = f"the bucket {bucket!r}"
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        return f"{what}: expected 3 to 63 lower-case letters, digits, hyphens and single dots"
    if _IP_ADDRESS.fullmatch(bucket):
        return f"{what}: expected a name, not an IP address"
    if _RESERVED.fullmatch(bucket):
        return f"{what}: S3 reserves names that begin or end so"
    return None


def instance_problem(instance_type: str) -> str | None:
    """Why SageMaker serves on no instance of this type; None if it does."""
    return _INSTANCE.problem("the instance type", instance_type) or _unlisted(
        "the instance type", instance_type, "ProductionVariantInstanceType"
    )


def ami_problem(version: str) -> str | None:
    """Why SageMaker has no such InferenceAmiVersion; None if it has."""
    return _unlisted("the AMI version", version, "ProductionVariantInferenceAmiVersion")


def routing_problem(strategy: str) -> str | None:
    """Why SageMaker has no such RoutingStrategy; None if it has."""
    return _unlisted("the routing", strategy, "RoutingStrategy")


def environment_problems(environment: Mapping[str, str]) -> list[str]:
    """What SageMaker refuses of a container's environment. Values are not shown: they may be secrets."""
    problems = [
        f"the variable {name!r}: expected letters, digits and underscores, the first of them no digit"
        for name in environment
        if not _VARIABLE.fullmatch(name)
    ]
    problems += [
        f"the variable {name} has {len(value)} characters: expected at most {_LONGEST_VALUE}"
        for name, value in environment.items()
        if len(value) > _LONGEST_VALUE
    ]
    if len(environment) > _MOST_VARIABLES:
        problems.append(f"{len(environment)} variables: expected at most {_MOST_VARIABLES}")
    return problems


def _unlisted(what: str, value: str, shape: str) -> str | None:
    from botocore import __version__

    known = _listed(shape)
    if not known or value in known:
        return None
    near = difflib.get_close_matches(value, known, n=3)
    advice = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known[:10])}"
    return (
        f"{what} {value!r} is not one that botocore {__version__} knows of SageMaker: {advice} (if it is newer than "
        "that: pip install --upgrade botocore)"
    )


@cache
def _listed(shape: str) -> Sequence[str]:
    """The values of an enumeration of SageMaker's API; empty where botocore's model does not have it."""
    from botocore.exceptions import BotoCoreError
    from botocore.model import NoShapeFoundError
    from botocore.session import Session

    try:
        found = Session().get_service_model("sagemaker").shape_for(shape)
    except (NoShapeFoundError, BotoCoreError):
        return ()
    return tuple(found.metadata.get("enum", ()))
