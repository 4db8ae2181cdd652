"""`djl-trtllm deploy`: serve a model on a SageMaker endpoint."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from djl_trtllm import deployment
from djl_trtllm.commands.console import errors_for_the_reader, progress_printer
from djl_trtllm.errors import DeploymentError, ModelError
from djl_trtllm.model import is_archive
from djl_trtllm.model.package import package
from djl_trtllm.model.remote.s3 import S3Address, is_s3

_WAIT_SECONDS = 3 * 3600.0


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
        str | None, typer.Option(help="SageMaker's InferenceAmiVersion, which sets the driver (docs/deploying.md).")
    ] = None,
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
        variables = dict(_variable(text) for text in env or ())
        if is_s3(model):
            data = S3Address.parse(model)
        elif dry_run:
            data = S3Address(bucket or "BUCKET", f"djl-trtllm/{chosen}/model.tar.gz")
        else:
            data = _upload(Path(model), bucket, chosen, progress)
        plan = deployment.Deployment(
            chosen, image, role, data, instance_type, instance_count, variables, ami_version=ami_version
        )
        if dry_run:
            for call in plan.calls():
                print(json.dumps({"call": call.method, **call.arguments}, indent=2))
            return
        deployment.deploy(plan, progress, wait_seconds=_WAIT_SECONDS if wait else None)


def _name(model: str) -> str:
    stem = model.rstrip("/").rpartition("/")[2].removesuffix(".tar.gz")
    return re.sub(r"[^a-zA-Z0-9]+", "-", stem).strip("-")[:63] or "model"


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
    if not is_archive(path):
        raise ModelError(f"{path} is neither a model directory nor a model.tar.gz nor an s3:// address")
    return deployment.upload_model(path, bucket, name, progress)
