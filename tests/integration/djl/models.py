"""Model directories for DJL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import javaproperties

from tests.support.models import scripted_model

MODES = ("rolling", "async")
_TEMPLATES = Path(__file__).parents[3] / "serving" / "djl"


def djl_model(directory: Path, mode: str, script: Mapping[str, object] | None = None, /, **options: object) -> Path:
    """The scripted model behind the handler of a mode, by the file that users start from."""
    template = javaproperties.loads((_TEMPLATES / mode / "serving.properties").read_text())
    return scripted_model(directory, script, **{**template, **options})
