"""The model of `serve --demo`: 3 million parameters that write little stories, compiled for the embedded engine."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.errors import ModelError

_NAME = "tiny-stories"
_PACKAGE = Path(__file__).parents[1]


def demo_model(package: Path = _PACKAGE) -> Path:
    """Its directory: beside the package in a clone, else in the installed package (setup.py).

    Raises ModelError if the installation has none, as those of the images.
    """
    for directory in (package.parent / "serving" / "models" / _NAME, package / "demo" / _NAME):
        if directory.is_dir():
            return directory
    raise ModelError(
        "--demo: this installation has no demonstration model, because it was built without serving/models; install "
        "'djl-trtllm[cpu]' from a wheel or a clone, or name a model"
    )
