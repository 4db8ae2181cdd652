"""`djl-trtllm deploy`: serve a model on a SageMaker endpoint."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from djl_trtllm import deployment
from djl_trtllm.commands.console import errors_for_the_reader, progress_printer
from djl_trtllm.config import load
from djl_trtllm.errors import DeploymentError, ModelError
from djl_trtllm.model import is_archive
from djl_trtllm.model.package import package
from djl_trtllm.model.remote.aws_scaling import Autoscaling, Routing
from djl_trtllm.model.remote.s3 import S3Address, is_s3

app = typer.Typer(add_completion=False)
_WAIT_SECONDS = 3 * 3600.0
_BUCKET_OF_SAGEMAKER = "sagemaker-region-account"
"""Stands for SageMaker's own bucket until the account is known."""


@app.command()
def deploy(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[DIR | FILE.tar.gz | s3://...]", help="The model; a directory is packed first."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image in ECR.", envvar="DJL_TRTLLM_IMAGE")] = None,
    role: Annotated[str | None, typer.Option(help="ARN of the IAM role.", envvar="SAGEMAKER_ROLE")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the endpoint. Default: the model's.")] = None,
    instance_type: Annotated[str, typer.Option(help="SageMaker instance.")] = "ml.g5.2xlarge",
    instance_count: Annotated[int, typer.Option(min=1, help="Number of instances.")] = 1,
    ami_version: Annotated[
        str | None,
        typer.Option(
            help="SageMaker's InferenceAmiVersion, which sets the driver; none: SageMaker's own. Default: on GPUs the "
            "one that the image needs, see --dry-run."
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="STRATEGY",
            help="How requests find an instance: prefix-aware[:BYTES], least-outstanding or random. "
            "Default: SageMaker's own.",
        ),
    ] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX[:CONCURRENCY]",
            help="Number of instances, and requests at the same time on each (default: 0.7 of the batch size).",
        ),
    ] = None,
    detailed_metrics: Annotated[
        bool, typer.Option("--detailed-metrics", help="Metrics of each instance, GPU and container in CloudWatch.")
    ] = False,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Environment of the container.")
    ] = None,
    bucket: Annotated[str | None, typer.Option(help="Bucket for the archive. Default: SageMaker's own.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the endpoint is in service.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the AWS calls without sending them.")] = False,
    delete: Annotated[
        str | None, typer.Option(metavar="NAME", help="Remove this endpoint, its configuration and its model.")
    ] = None,
) -> None:
    """Deploy a model to a SageMaker endpoint: upload it, create model, configuration and endpoint, and wait."""
    with errors_for_the_reader():
        progress = progress_printer()
        if delete is not None:
            deployment.delete(delete, progress)
            return
        missing = [
            text for text, value in (("the model", model), ("--image", image), ("--role", role)) if value is None
        ]
        if model is None or image is None or role is None:
            raise DeploymentError(f"missing: {', '.join(missing)} (see `djl-trtllm deploy --help`)")
        chosen = name or _name(model)
        address = None if is_s3(model) else S3Address(bucket or _BUCKET_OF_SAGEMAKER, deployment.key_of(chosen))
        environment = dict(_variable(text) for text in env or ())
        plan = deployment.Deployment(
            chosen,
            image,
            role,
            address or S3Address.parse(model),
            instance_type,
            instance_count,
            environment,
            ami_version=_ami(ami_version, instance_type),
            routing=None if routing is None else Routing.parse(routing),
            autoscaling=None if autoscale is None else Autoscaling.parse(autoscale, _batch_size(model, environment)),
            detailed_metrics=detailed_metrics,
        )
        if plan.autoscaling is not None and not wait:
            raise DeploymentError("--autoscale needs an endpoint in service: leave out --no-wait")
        plan.check()
        if address is not None:
            _check_model(Path(model), plan.environment, progress)
        if dry_run:
            for call in [*plan.calls(), *plan.scaling_calls()]:
                print(json.dumps({"call": call.method, **call.arguments}, indent=2))
            return
        deployment.require_unused(chosen)
        if address is not None:
            plan = replace(plan, model_data=_upload(Path(model), bucket, chosen, progress))
        deployment.deploy(plan, progress, wait_seconds=_WAIT_SECONDS if wait else None)


def _ami(asked: str | None, instance_type: str) -> str | None:
    if asked is None:
        return deployment.default_ami(instance_type)
    return None if asked == "none" else asked


def _batch_size(model: str, environment: Mapping[str, str]) -> int:
    """Requests that run together on one instance."""
    directory = Path(model) if not is_s3(model) and Path(model).is_dir() else None
    return load(directory, environment).options.max_rolling_batch_size


def _check_model(path: Path, environment: Mapping[str, str], progress: Callable[[str], None]) -> None:
    """Report now what packing or serving would refuse later. Raises ModelError and ConfigError."""
    if path.is_dir():
        for warning in load(path, environment).warnings:
            progress(f"warning: {warning}")
    elif not is_archive(path):
        raise ModelError(f"{path} is neither a model directory nor a model.tar.gz nor an s3:// address")


def _name(model: str) -> str:
    name = model.rstrip("/").rpartition("/")[2] if is_s3(model) else Path(model).resolve().name
    stem = name.removesuffix(".tar.gz")
    return re.sub(r"[^a-zA-Z0-9]+", "-", stem).strip("-")[:63].rstrip("-") or "model"


def _variable(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise DeploymentError(f"--env {text}: expected KEY=VALUE")
    return key, value


def _upload(path: Path, bucket: str | None, name: str, progress: Callable[[str], None]) -> S3Address:
    if path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "model.tar.gz")
            progress(f"packing {path}")
            package(path, archive)
            return deployment.upload_model(archive, bucket, name, progress)
    return deployment.upload_model(path, bucket, name, progress)
