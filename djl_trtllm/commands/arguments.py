"""Arguments of commands: the model that they are about, and options whose value is JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from djl_trtllm.errors import DjlTrtllmError

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR | FILE.tar.gz | OWNER/NAME | s3://...]",
        help="The model. Default: SageMaker's /opt/ml/model if it exists, else HF_MODEL_ID or OPTION_MODEL_ID.",
    ),
]

SAGEMAKER_MODEL_DIR = Path("/opt/ml/model")


def find_model(model: str | None) -> str | None:
    """Return `model`, else SageMaker's model directory if it has files, else the model that the environment names."""
    if model is not None:
        return model
    if SAGEMAKER_MODEL_DIR.is_dir() and any(SAGEMAKER_MODEL_DIR.iterdir()):
        return str(SAGEMAKER_MODEL_DIR)
    return os.environ.get("HF_MODEL_ID") or os.environ.get("OPTION_MODEL_ID") or None


def json_object(option: str, text: str) -> dict[str, Any]:
    """Parse the value of an option that is a JSON object. Raises DjlTrtllmError."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise DjlTrtllmError(f"{option} {text}: expected a JSON object: {error}") from None
    return value
