"""Compares the table of TensorRT-LLM's names with NVIDIA's manifest of the LLM's arguments.

From 1.3 on TensorRT-LLM has a file `usage/llm_args_golden_manifest.json`: the arguments that its usage report knows,
which are numbers, switches and choices, not texts and objects. `python -m tools.tensorrt_llm.manifest` takes such a
file and its `--version`, or without a file the paths of 1.4.0rc1 beside this module. Status 1 where the table has an
argument in that version that the manifest lacks (it ended, and its row needs an `until`), or other choices of one,
which planning would refuse. Arguments that the table lacks are counted: `option.extra_llm_api_options` passes them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from djl_trtllm.backends.extra_options import choices
from djl_trtllm.backends.tensorrt_llm.names import Member, members, owners

PATHS = Path(__file__).with_name("manifest_1_4.txt")
VERSION = "1.4.0rc1"
_LLM = "LLM.pytorch"
# Types of arguments that the manifest has; an enum is a choice that may be text.
_PLAIN = r"int|float|bool|Literal\[.*\]|List\[(int|float)\]|Union\[str, (?!Path)\w+\]"
_REPORTED = re.compile(rf"^(Optional\[)?({_PLAIN})\]?$")


Known = Mapping[str, frozenset[str]]
"""The paths of a manifest, each with the choices of its Literal, if it is one."""


def paths(file: Path) -> Known:
    """A manifest, or a list of its paths. Raises ValueError for other data."""
    text = file.read_text(encoding="utf-8")
    if not text.startswith("{"):
        rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
        return {path: frozenset(chosen) for path, *chosen in rows}
    try:
        return {
            row["path"]: frozenset(row["allowed_values"] if "Literal" in row["annotation"] else ())
            for row in json.loads(text)["TorchLlmArgs"]
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected TensorRT-LLM's manifest of arguments ({error!r} is missing)") from error


def tabled(version: str, owner: str = _LLM, prefix: str = "") -> Iterator[tuple[str, Member]]:
    """The arguments of the table by their paths."""
    for member in members(owner, version).values():
        inner = next((name for name in re.findall(r"\w+", member.type) if name in owners()), None)
        if inner is not None and owners()[inner].kind == "class":
            yield from tabled(version, inner, f"{prefix}{member.name}.")
        elif member.kind == "argument":
            yield f"{prefix}{member.name}", member


def ended(known: Known, version: str) -> list[str]:
    """Paths of the table that the manifest would have, and has not."""
    return [
        path
        for path, member in tabled(version)
        if path not in known and (_REPORTED.match(member.type) or owners().keys() & re.findall(r"\w+", member.type))
    ]


def changed(known: Known, version: str) -> Iterator[str]:
    """Arguments with other choices than in the table, with the difference."""
    for path, member in tabled(version):
        given, wanted = set(choices(member.type) or ()), known.get(path, frozenset())
        if given and wanted and given != wanted:
            yield f"{path}: {', '.join(sorted(given - wanted)) or 'nothing'} in the table alone, " + (
                f"{', '.join(sorted(wanted - given)) or 'nothing'} in the manifest of {version} alone"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.tensorrt_llm.manifest", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", type=Path, nargs="?", default=PATHS, help="a manifest, or a list of its paths")
    parser.add_argument("--version", default=VERSION, help="the release that it is of (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    try:
        known = paths(parsed.file)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    missing = ended(known, parsed.version)
    lines = [f"{path}: in the table, not in the manifest of {parsed.version}: give it an `until`" for path in missing]
    different = list(changed(known, parsed.version))
    lines += different
    new = known.keys() - {path for path, _ in tabled(parsed.version)}
    lines.append(f"{len(known)} arguments, {len(missing)} ended, {len(new)} that only the extra options pass")
    print("\n".join(lines))
    return 1 if missing or different else 0


if __name__ == "__main__":
    sys.exit(main())
