"""Create and remove SageMaker endpoints.

A deployment is a list of AWS calls, so that a dry run prints exactly what would be sent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from djl_trtllm.errors import DeploymentError
from djl_trtllm.model.remote import aws, aws_names, s3
from djl_trtllm.model.remote.aws_scaling import AUTOSCALING, VARIANT, Autoscaling, AwsCall, Routing, scalable
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.remote.upload import upload_file

_POLL_SECONDS = 10.0
_REPORT_EVERY_SECONDS = 60.0
_DONE = ("InService", "Failed", "OutOfService", "RollingBack", "UpdateRollbackFailed")


GPU_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
"""The AMI with driver 580 for CUDA 13 (botocore's model of SageMaker, 1.44.5), which the TensorRT-LLM images need."""

# Instances with a GPU for CUDA 13, which has dropped those of p2 and p3; r and trn have none of NVIDIA's.
_CUDA_INSTANCE = re.compile(r"ml\.(g[4-9]|gr[4-9]|p[4-9]).*")


def default_ami(instance_type: str) -> str | None:
    """The AMI that the images need on an instance; None: SageMaker's own, on machines without a GPU for them."""
    return GPU_AMI if _CUDA_INSTANCE.fullmatch(instance_type) else None


@dataclass(frozen=True)
class Deployment:
    """What to run. Model, endpoint configuration and endpoint are all named `name`.

    `image` is a container image in ECR, `role` the ARN of its IAM role. `model_data` is the address of a model.tar.gz,
    or of a prefix whose files SageMaker copies unchanged. `startup_seconds` bounds the time until /ping answers,
    compiling included. `ami_version` is SageMaker's `InferenceAmiVersion`: it decides the driver version of the
    machine, and on SageMaker's own default, too old for CUDA 13, the container does not start (see `default_ami`).
    `detailed_metrics` are those of instances, GPUs and the container's own page. With `autoscaling`, the endpoint has
    to be in service before it can be set up.
    """

    name: str
    image: str
    role: str
    model_data: S3Address
    instance_type: str
    instance_count: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    startup_seconds: int = 3600
    ami_version: str | None = None
    routing: Routing | None = None
    autoscaling: Autoscaling | None = None
    detailed_metrics: bool = False

    def check(self) -> None:
        """Raise DeploymentError with everything that AWS would refuse of these names."""
        found = [
            aws_names.ENDPOINT.problem("the endpoint", self.name),
            aws_names.IMAGE.problem("the image", self.image),
            aws_names.ROLE.problem("the role", self.role),
            aws_names.bucket_problem(self.model_data.bucket),
            aws_names.instance_problem(self.instance_type),
            None if self.ami_version is None else aws_names.ami_problem(self.ami_version),
            None if self.routing is None else self.routing.problem(),
            *aws_names.environment_problems(self.environment),
        ]
        if problems := [problem for problem in found if problem is not None]:
            raise DeploymentError("; ".join(problems))

    def calls(self) -> list[AwsCall]:
        """The calls that create the endpoint, in order. Raises DeploymentError, see `check`."""
        self.check()
        container: dict[str, Any] = {"Image": self.image, "Environment": dict(self.environment)}
        if self.model_data.key.endswith(".tar.gz"):
            container["ModelDataUrl"] = str(self.model_data)
        else:
            prefix = self.model_data.below("")
            source = {
                "S3Uri": f"s3://{self.model_data.bucket}/{prefix}",
                "S3DataType": "S3Prefix",
                "CompressionType": "None",
            }
            container["ModelDataSource"] = {"S3DataSource": source}
        variant = {
            "VariantName": VARIANT,
            "ModelName": self.name,
            "InstanceType": self.instance_type,
            "InitialInstanceCount": self.instance_count,
            "ModelDataDownloadTimeoutInSeconds": self.startup_seconds,
            "ContainerStartupHealthCheckTimeoutInSeconds": self.startup_seconds,
        }
        if self.ami_version is not None:
            variant["InferenceAmiVersion"] = self.ami_version
        if self.routing is not None:
            variant["RoutingConfig"] = self.routing.config()
        if self.autoscaling is not None:
            variant["InitialInstanceCount"] = min(
                max(self.instance_count, self.autoscaling.least), self.autoscaling.most
            )
        configuration: dict[str, Any] = {"EndpointConfigName": self.name, "ProductionVariants": [variant]}
        if self.detailed_metrics:
            container["ContainerMetricsConfig"] = {"MetricsEndpoints": [{"MetricsEndpointPath": "/metrics"}]}
            configuration["MetricsConfig"] = {"EnableEnhancedMetrics": True, "EnableDetailedObservability": True}
        return [
            AwsCall(
                "create_model",
                {"ModelName": self.name, "ExecutionRoleArn": self.role, "PrimaryContainer": container},
            ),
            AwsCall("create_endpoint_config", configuration),
            AwsCall("create_endpoint", {"EndpointName": self.name, "EndpointConfigName": self.name}),
        ]

    def scaling_calls(self) -> list[AwsCall]:
        """The calls for an endpoint that is in service."""
        return [] if self.autoscaling is None else self.autoscaling.calls(self.name)


def deploy(deployment: Deployment, progress: Callable[[str], None], *, wait_seconds: float | None = None) -> None:
    """Create model, configuration and endpoint; with `wait_seconds`, wait until the endpoint is in service.

    If a call fails, the parts created before it are removed again. Autoscaling is set up after the wait; if that fails,
    the endpoint stays. Raises DeploymentError.
    """
    if deployment.autoscaling is not None and wait_seconds is None:
        raise DeploymentError("--autoscale needs an endpoint in service: leave out --no-wait")
    client = _client()
    made: list[AwsCall] = []
    for call in deployment.calls():
        progress(f"{call.method} {deployment.name}")
        try:
            _send(client, call, deployment.name)
        except DeploymentError:
            for earlier in reversed(made):
                _undo(client, earlier, progress)
            raise
        made.append(call)
    if wait_seconds is not None:
        _wait(client, deployment.name, progress, wait_seconds)
    for call in deployment.scaling_calls():
        progress(f"{call.method} {deployment.name}")
        _send(_client(call.service), call, deployment.name)


def require_unused(name: str) -> None:
    """Raise DeploymentError if the account has a model, configuration or endpoint of this name already.

    Also if there is no account to ask. An account that may not ask is refused later, by what it asks for.
    """
    client = _client()
    used = []
    for what, method, argument in (
        ("endpoint", "describe_endpoint", "EndpointName"),
        ("endpoint configuration", "describe_endpoint_config", "EndpointConfigName"),
        ("model", "describe_model", "ModelName"),
    ):
        try:
            if _described(client, method, **{argument: name}) is not None:
                used.append(what)
        except DeploymentError as error:
            if "AccessDenied" not in str(error):
                raise
    if used:
        raise DeploymentError(
            f"{name} is already the name of {' and of '.join(f'an {u}' if u[0] == 'e' else f'a {u}' for u in used)} in "
            f"this account and region: choose another one with --name, or remove it with `djl-trtllm deploy --delete "
            f"{name}`"
        )


def delete(name: str, progress: Callable[[str], None]) -> None:
    """Remove an endpoint, its configuration and its models; parts that are already gone are skipped.

    Raises DeploymentError if nothing of that name exists.
    """
    if problem := aws_names.ENDPOINT.problem("the endpoint", name):
        raise DeploymentError(problem)
    client = _client()
    config = _described(client, "describe_endpoint", EndpointName=name)
    config_name = config["EndpointConfigName"] if config else name
    variants = _described(client, "describe_endpoint_config", EndpointConfigName=config_name)
    models = [variant["ModelName"] for variant in variants["ProductionVariants"]] if variants else [name]
    models = [model for model in models if _described(client, "describe_model", ModelName=model)]
    calls = [AwsCall("delete_endpoint", {"EndpointName": name})] if config else []
    calls += [AwsCall("delete_endpoint_config", {"EndpointConfigName": config_name})] if variants else []
    calls += [AwsCall("delete_model", {"ModelName": model}) for model in models]
    if not calls:
        raise DeploymentError(
            f"there is no endpoint, endpoint configuration or model {name} in this account and region"
        )
    if config:
        _stop_scaling(name, progress)
    for call in calls:
        progress(f"{call.method} {next(iter(call.arguments.values()))}")
        _send(client, call, name)


def _stop_scaling(name: str, progress: Callable[[str], None]) -> None:
    """Remove the autoscaling of an endpoint, if it has one and the account may ask."""
    target = scalable(name)
    try:
        client = _client(AUTOSCALING)
        with _deployment_errors(f"the autoscaling of {name}"):
            found = client.describe_scalable_targets(
                ServiceNamespace=target["ServiceNamespace"], ResourceIds=[target["ResourceId"]]
            )["ScalableTargets"]
        if found:
            progress(f"deregister_scalable_target {name}")
            _send(client, AwsCall("deregister_scalable_target", target), name)
    except DeploymentError as error:
        progress(f"autoscaling could not be removed, if there is any: {error}")


def _send(client: Any, call: AwsCall, name: str) -> None:
    with _deployment_errors(f"{call.method} {name}"):
        getattr(client, call.method)(**call.arguments)


def key_of(name: str) -> str:
    """Where the archive of an endpoint is in its bucket."""
    return f"djl-trtllm/{name}/model.tar.gz"


def upload_model(archive: Path, bucket: str | None, name: str, progress: Callable[[str], None]) -> S3Address:
    """Upload a model.tar.gz to the bucket, by default SageMaker's own (created if it does not exist).

    Raises DeploymentError and DownloadError.
    """
    address = S3Address(bucket or default_bucket(), key_of(name))
    if bucket is None:
        _ensure_bucket(address.bucket, progress)
    upload_file(archive, address, progress)
    return address


def default_bucket() -> str:
    """The bucket that SageMaker's SDK uses: `sagemaker-REGION-ACCOUNT`. Raises DeploymentError."""
    with _deployment_errors("the account"):
        account = aws.client("sts").get_caller_identity()["Account"]
    return f"sagemaker-{_client().meta.region_name}-{account}"


def _ensure_bucket(bucket: str, progress: Callable[[str], None]) -> None:
    from botocore.exceptions import ClientError

    with s3.download_errors(f"s3://{bucket}"):
        client = s3.client()
        try:
            client.head_bucket(Bucket=bucket)
            return
        except ClientError as error:
            if s3.status(error) != 404:
                raise
        progress(f"making the bucket {bucket}")
        region = client.meta.region_name
        # us-east-1 is the default and must not be named.
        where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        client.create_bucket(Bucket=bucket, **where)


def _wait(client: Any, name: str, progress: Callable[[str], None], seconds: float) -> None:
    started = time.monotonic()
    reported = -_REPORT_EVERY_SECONDS
    while True:
        with _deployment_errors(f"describe_endpoint {name}"):
            answer = client.describe_endpoint(EndpointName=name)
        status, waited = answer["EndpointStatus"], time.monotonic() - started
        if status == "InService":
            progress(f"the endpoint {name} is in service ({waited:.0f} s)")
            return
        if status in _DONE:
            raise DeploymentError(
                f"the endpoint {name} is {status}: {answer.get('FailureReason', 'no reason given')}. Its log is in "
                f"CloudWatch under /aws/sagemaker/Endpoints/{name}; `djl-trtllm deploy --delete {name}` removes it"
            )
        if waited > seconds:
            raise DeploymentError(
                f"the endpoint {name} is still {status} after {seconds:.0f} s; it continues without this command "
                f"(`aws sagemaker describe-endpoint --endpoint-name {name}`)"
            )
        if waited - reported >= _REPORT_EVERY_SECONDS:
            progress(f"the endpoint {name} is {status} ({waited:.0f} s)")
            reported = waited
        time.sleep(_POLL_SECONDS)


def _undo(client: Any, call: AwsCall, progress: Callable[[str], None]) -> None:
    method = call.method.replace("create_", "delete_")
    key, value = next(iter(call.arguments.items()))
    try:
        with _deployment_errors(method):
            getattr(client, method)(**{key: value})
        progress(f"removed again: {value} ({method})")
    except DeploymentError as error:
        progress(f"could not be removed again: {error}")


def _described(client: Any, method: str, **name: str) -> Any:
    """The response, or None if the resource does not exist."""
    from botocore.exceptions import ClientError

    with _deployment_errors(f"{method} {next(iter(name.values()))}"):
        try:
            return getattr(client, method)(**name)
        except ClientError as error:
            if error.response["Error"]["Code"] == "ValidationException":
                return None
            raise


def _client(service: str = "sagemaker") -> Any:
    with _deployment_errors("SageMaker"):
        return aws.client(service)


@contextmanager
def _deployment_errors(what: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

    try:
        yield
    except ClientError as error:
        answer = error.response["Error"]
        raise DeploymentError(f"{what}: AWS refused: {answer.get('Message')} ({answer.get('Code')})") from error
    except NoRegionError as error:
        raise DeploymentError(f"{what}: no region is set: set AWS_REGION") from error
    except NoCredentialsError as error:
        raise DeploymentError(f"{what}: there are no AWS credentials: log in, or set AWS_PROFILE") from error
    except BotoCoreError as error:
        raise DeploymentError(f"{what}: {error}") from error
