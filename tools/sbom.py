"""The part of a CycloneDX bill of materials that an image gets: uv lists the packages of all Pythons it has locked.

uv export --format cyclonedx1.5 ... | python -m tools.sbom
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from packaging.markers import Marker

_ROOT = Path(__file__).parents[1]
_MARKER = "uv:package:marker"
_MACHINES = ("x86_64", "aarch64")


def image_python() -> str:
    """The version in the images. (TensorRT-LLM's release has the same minor one.)"""
    text = (_ROOT / "docker" / "cpu.Dockerfile").read_text(encoding="utf-8")
    (version,) = re.findall(r"^ARG PYTHON=(\d+\.\d+\.\d+)", text, re.MULTILINE)
    return str(version)


def of_image(bill: dict[str, Any], python: str) -> dict[str, Any]:
    """The bill of materials without the packages of other versions of Python."""
    components = [component for component in bill["components"] if _is_for(component, python)]
    kept = {bill["metadata"]["component"]["bom-ref"], *(component["bom-ref"] for component in components)}
    dependencies = [
        {**each, "dependsOn": [ref for ref in each["dependsOn"] if ref in kept]} if "dependsOn" in each else each
        for each in bill["dependencies"]
        if each["ref"] in kept
    ]
    return {**bill, "components": components, "dependencies": dependencies}


def _is_for(component: dict[str, Any], python: str) -> bool:
    markers = [each["value"] for each in component.get("properties", []) if each["name"] == _MARKER]
    environments = [
        {"python_full_version": python, "python_version": python.rpartition(".")[0], "platform_machine": machine}
        for machine in _MACHINES
    ]
    return all(any(map(Marker(marker).evaluate, environments)) for marker in markers)


if __name__ == "__main__":
    json.dump(of_image(json.load(sys.stdin), image_python()), sys.stdout, indent=2)
    print()
