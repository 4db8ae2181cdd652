"""Compares the table of TensorRT-LLM's names with the JSON schema of a TensorRT-LLM's arguments.

`python -m tools.tensorrt_llm.schema [FILE]` takes a `schema.discovered.json`, which the public repository
henrycgbaker/LLenergyMeasure has for each release, or a reduced one; without FILE the reduced schema of 1.2.1 beside
this module. Status 1 where a difference has no reason in `schema_reasons.yaml`, or a reason there is for no
difference. `--reduce OUT` writes what is compared of FILE.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from djl_trtllm.backends.tensorrt_llm.names import REQUIRED, Member, members, owners
from tools.tensorrt_llm.schema_types import REQUIRED_DEFAULT, kinds_of, reduced

_HERE = Path(__file__).parent
REDUCED = _HERE / "schema_1_2_1.json"
REASONS = _HERE / "schema_reasons.yaml"
_KINDS = ("argument", "attribute", "field")


@dataclass(frozen=True)
class Difference:
    """`subject` is a class, or `CLASS.NAME`."""

    subject: str
    text: str


def differences(schema: Mapping[str, Any]) -> Iterator[Difference]:
    """The differences between a reduced schema and the table about the schema's version."""
    version = schema["version"]
    for owner, names in schema["classes"].items():
        if not _known(owner, version):
            yield Difference(owner, "a class of the schema that the table lacks")
            continue
        yield from _of_class(owner, names, version)
    for owner, values in schema["enums"].items():
        yield from _of_enum(owner, values, version)
    for owner in schema["other_classes"]:
        if owner not in owners():
            yield Difference(owner, "a class of the schema that the table lacks")


def _known(owner: str, version: str) -> Mapping[str, Member]:
    return members(owner, version) if owner in owners() else {}


def _of_class(owner: str, names: Mapping[str, Any], version: str) -> Iterator[Difference]:
    table = {name: member for name, member in members(owner, version).items() if member.kind in _KINDS}
    for name in sorted(names.keys() - table.keys()):
        yield Difference(f"{owner}.{name}", f"in the schema only, {names[name]['type']} = {names[name]['default']!r}")
    for name in sorted(table.keys() - names.keys()):
        yield Difference(f"{owner}.{name}", f"in the table only, from {table[name].since} on")
    for name in sorted(table.keys() & names.keys()):
        for text in _of_name(table[name], names[name]):
            yield Difference(f"{owner}.{name}", text)


def _of_name(member: Member, seen: Mapping[str, Any]) -> Iterator[str]:
    kinds, expected = set(kinds_of(member.type)), set(seen["type"])
    if "string" in expected:
        # The part of the schema about LLM has any choice of strings as a string.
        kinds = {"string" if kind.startswith("'") else kind for kind in kinds}
    if kinds != expected:
        yield f"type {member.type} in the table, {' or '.join(seen['type'])} in the schema"
    default = _default(member)
    if default != seen["default"] or isinstance(default, bool) != isinstance(seen["default"], bool):
        yield f"default {default!r} in the table, {seen['default']!r} in the schema"


def _default(member: Member) -> object:
    """A default as a schema has it: values made anew for each object have none, nor have required arguments of LLM."""
    default = member.default
    if default is REQUIRED:
        return None if member.owner.endswith("LlmArgs") else REQUIRED_DEFAULT
    if isinstance(default, Mapping) and "enum" in default:
        return members(default["enum"], member.since)[default["name"]].default
    return None if isinstance(default, (Mapping, list)) else default


def _of_enum(owner: str, values: Sequence[object], version: str) -> Iterator[Difference]:
    known = {member.default for member in _known(owner, version).values()}
    if not known:
        yield Difference(owner, "an enum of the schema that the table lacks")
        return
    if missing := [value for value in values if value not in known]:
        yield Difference(owner, f"values {missing} in the schema only")
    if more := sorted(str(value) for value in known if value not in values):
        yield Difference(owner, f"values {more} in the table only")


def report(found: Sequence[Difference], reasons: Mapping[str, str]) -> tuple[list[str], bool]:
    """The differences as text, and whether every difference has its reason and every reason a difference."""
    lines, unexplained = [], 0
    for difference in found:
        reason = reasons.get(difference.subject)
        unexplained += reason is None
        lines.append(f"{difference.subject}: {difference.text}: {reason or 'NO REASON'}")
    idle = sorted(reasons.keys() - {difference.subject for difference in found})
    lines += [f"{subject}: no difference, but a reason in {REASONS.name}" for subject in idle]
    lines.append(f"{len(found)} differences, {unexplained} without a reason; {len(idle)} reasons for none")
    return lines, not unexplained and not idle


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.tensorrt_llm.schema", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "file", type=Path, nargs="?", default=REDUCED, help="a schema.discovered.json, or a reduced one"
    )
    parser.add_argument("--reasons", type=Path, default=REASONS, help="why what differs may")
    parser.add_argument("--reduce", type=Path, metavar="OUT", help="write what is compared of the file")
    parsed = parser.parse_args(arguments)
    try:
        schema = reduced(json.loads(parsed.file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{parsed.file} is no schema: {type(error).__name__}: {error}")
    if parsed.reduce:
        parsed.reduce.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
    lines, agreed = report(list(differences(schema)), yaml.safe_load(parsed.reasons.read_text(encoding="utf-8")) or {})
    print(f"TensorRT-LLM {schema['version']}, {schema['source']}", *lines, sep="\n")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
