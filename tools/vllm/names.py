"""Compares the table of vLLM's names with a vLLM, which is read and not run.

`python -m tools.vllm.names` reads the installed one, `--tree DIR` the folder `vllm` of an unpacked wheel or a checkout.
Status 1 where something differs. `--write VERSION=DIR ...` makes the arguments of the table from these folders.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from djl_trtllm.backends.vllm import names
from djl_trtllm.backends.vllm.names import (
    OWNER,
    declared_objects,
    installed_package,
    installed_version,
    tabled_arguments,
)

TABLE = Path(names.__file__).with_name("names.json")

Rows = list[list[str | None]]


def declared_arguments(package: Path) -> dict[str, str]:
    """The arguments of EngineArgs in `engine/arg_utils.py`, with the values that types list; none if unreadable."""
    return dict(declared_objects(package).get(OWNER, {}))


def table_of(packages: dict[str, Path]) -> dict[str, Rows]:
    """The rows of each argument, [type, since, until], from the packages by version, the oldest first."""
    rows: dict[str, Rows] = {}
    for version, package in packages.items():
        declared = declared_arguments(package)
        if not declared:
            raise SystemExit(f"{package}: EngineArgs cannot be read")
        for name, open_rows in rows.items():
            if open_rows[-1][2] is None and declared.get(name) != open_rows[-1][0]:
                open_rows[-1][2] = version
        for name, kind in declared.items():
            known = rows.setdefault(name, [])
            if not known or known[-1][2] is not None:
                known.append([kind, version, None])
    return dict(sorted(rows.items()))


def write(packages: dict[str, Path]) -> None:
    """Replace the arguments and the versions of the table."""
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"seam": {}}
    arguments = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in table_of(packages).items())
    seam = ",\n".join(f"{json.dumps(name)}: {json.dumps(members)}" for name, members in table["seam"].items())
    parts = (
        f'"versions": {json.dumps(list(packages))}',
        f'"seam": {{\n{seam}\n}}',
        f'"arguments": {{\n{arguments}\n}}',
    )
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def differences(version: str, package: Path) -> list[str]:
    """What the package has otherwise than the table says, one line each."""
    declared, tabled = declared_arguments(package), tabled_arguments(version)
    found = [f"EngineArgs.{name}: the table lacks it" for name in declared if name not in tabled]
    found += [f"EngineArgs.{name}: vLLM {version} lacks it" for name in tabled if name not in declared]
    found += [
        f"EngineArgs.{name}: {tabled[name]} in the table, {kind} in vLLM"
        for name, kind in declared.items()
        if name in tabled and tabled[name] != kind
    ]
    for path, members in json.loads(TABLE.read_text(encoding="utf-8"))["seam"].items():
        has = members_of(package, path)
        found += [f"{path}: vLLM {version} lacks it"] if has is None else []
        found += [f"{path}.{name}: vLLM {version} lacks it" for name in members if has is not None and name not in has]
    return found


def members_of(package: Path, path: str) -> set[str] | None:
    """The methods, fields and arguments of a class or function (`module:name`); None where it is not there.

    Those of a class's bases in the same module count, and what its methods set on `self`.
    """
    module, _, name = path.partition(":")
    file = package.joinpath(*module.split(".")[1:])
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    declared = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    owner, _, function = name.partition(".")
    node = declared.get(owner)
    if node is None:
        return None
    if function:
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == function]
        return {
            argument.arg for method in methods for argument in ast.walk(method.args) if isinstance(argument, ast.arg)
        }
    found: set[str] = set()
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in declared and base.id != owner:
                found |= members_of(package, f"{module}:{base.id}") or set()
    for item in ast.walk(node):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.add(item.target.id)
        elif isinstance(item, ast.FunctionDef):
            found.add(item.name)
        elif isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
            found.add(item.attr)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare; the status."""
    parser = argparse.ArgumentParser(prog="python -m tools.vllm.names", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", nargs="+", metavar="VERSION=DIR")
    parser.add_argument("--tree", type=Path, metavar="DIR")
    parser.add_argument("--version", help="the version of --tree")
    options = parser.parse_args(argv)
    if options.write:
        write({version: Path(path) for version, _, path in (pair.partition("=") for pair in options.write)})
        return 0
    package, installed = options.tree or installed_package(), installed_version()
    version = options.version or (installed[0] if installed is not None and options.tree is None else None)
    if package is None or version is None:
        parser.error("vLLM is not installed: name an unpacked one with --tree DIR --version VERSION")
    found = differences(version, package)
    print("\n".join(found) or f"vLLM {version} is as in the table")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
