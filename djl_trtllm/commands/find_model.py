"""The model that a command names, or else finds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR | FILE.tar.gz | OWNER/NAME | s3://...]",
        help="The model. Default: SageMaker's /opt/ml/model if it exists, else HF_MODEL_ID or OPTION_MODEL_ID.",
    ),
]

SAGEMAKER_MODEL_DIR = Path("/opt/ml/model")


def find_model(model: str | None) -> str | None:
    """`model`, else SageMaker's model directory if there is something in it, else what the environment names."""
    if model is not None:
        return model
    if SAGEMAKER_MODEL_DIR.is_dir() and any(SAGEMAKER_MODEL_DIR.iterdir()):
        return str(SAGEMAKER_MODEL_DIR)
    return os.environ.get("HF_MODEL_ID") or os.environ.get("OPTION_MODEL_ID") or None
