"""Compares the table of TensorRT-LLM's names with a TensorRT-LLM.

`python -m tools.tensorrt_llm.check` imports the installed one, `--tree DIR` reads an unpacked one (a
checkout, a wheel) without running it. Status 1 where something differs. What was not seen is listed as not seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from djl_trtllm.backends.tensorrt_llm.names import REQUIRED, Member, Owner, all_members, members, module_of, owners
from tools.tensorrt_llm.installed import Installed
from tools.tensorrt_llm.seen import UNREAD, Absent, Package, Seen, Sight, Unseen, same_type
from tools.tensorrt_llm.tree import Tree


class Verdict(Enum):
    """What looking at one name came to."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNREAD = "there, its default not readable"
    UNSEEN = "not seen"


@dataclass(frozen=True)
class Finding:
    """One name of an owner; `name` is empty where it is about the owner itself.

    `text` says what differs or why it was not seen. `types` are the two annotations, the table's first, where they do
    not say the same: that alone is no difference.
    """

    owner: str
    name: str
    verdict: Verdict
    text: str = ""
    types: tuple[str, str] | None = None


@dataclass(frozen=True)
class Report:
    """Everything that was compared with one TensorRT-LLM."""

    version: str
    description: str
    findings: tuple[Finding, ...]

    def of(self, verdict: Verdict) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(finding for finding in self.findings if finding.verdict is verdict)

    def lines(self) -> Iterator[str]:
        """As text: what was not simply equal, owner by owner, and the sums."""
        yield f"TensorRT-LLM {self.version}, {self.description}"
        for owner in dict.fromkeys(finding.owner for finding in self.findings):
            mine = [finding for finding in self.findings if finding.owner == owner]
            equal = sum(finding.verdict is Verdict.EQUAL for finding in mine)
            yield f"{owner}: {equal} of {len(mine)} equal"
            yield from (f"  {line}" for finding in mine for line in _lines(finding))
        yield ", ".join(f"{len(self.of(verdict))} {verdict.value}" for verdict in Verdict)


def check_tree(root: Path, version: str | None = None) -> Report:
    """Compare with the package in or at `root`, treated as `version` (default: what its version.py says).

    Raises FileNotFoundError where there is none, ValueError where it does not say its version and none is given.
    """
    return check(Tree(root), version)


def check_installed() -> Report:
    """Compare with the installed package; raises ImportError where there is none."""
    return check(Installed())


def check(package: Package, version: str | None = None) -> Report:
    """Compare with a package; ValueError where neither it nor `version` says which version it is."""
    wanted = version or package.version
    if wanted is None:
        raise ValueError(f"{package.description}: the version is unknown; give it with --version")
    bases = {base for owner in owners().values() for base in owner.base}
    findings: list[Finding] = []
    for owner in owners().values():
        # What others derive from is compared with them, unless it is used itself too.
        if owner.name not in bases or owner.declared is not None:
            findings += _compare(owner, wanted, package)
    return Report(wanted, package.description, tuple(findings))


def _compare(owner: Owner, version: str, package: Package) -> Iterator[Finding]:
    rows = members(owner.name, version)
    try:
        module = module_of(owner.name, version)
    except KeyError:
        yield from _not_there(owner, package)
        return
    try:
        sight = package.look(owner, module)
    except Absent as error:
        yield Finding(owner.name, "", Verdict.DIFFERENT, f"not there: {error}")
        return
    except Unseen as error:
        yield Finding(owner.name, "", Verdict.UNSEEN, str(error))
        yield from (Finding(owner.name, name, Verdict.UNSEEN) for name in rows)
        return
    for base in owner.base:
        if base not in owners():
            yield _derived(owner, base, sight)
    yield from (_row(owner, member, sight) for member in rows.values())
    yield from _too_early_or_late(owner, rows.keys(), sight)


def _not_there(owner: Owner, package: Package) -> Iterator[Finding]:
    """An owner that this version does not have, as far as the table says."""
    for _, _, module in owner.imports:
        try:
            package.look(owner, module)
        except (Absent, Unseen):
            continue
        yield Finding(
            owner.name, "", Verdict.DIFFERENT, f"is there, in {module}; the table has it {_owner_spans(owner)}"
        )


def _derived(owner: Owner, base: str, sight: Sight) -> Finding:
    if base in sight.bases:
        return Finding(owner.name, base, Verdict.EQUAL)
    verdict = Verdict.DIFFERENT if sight.whole else Verdict.UNSEEN
    return Finding(owner.name, base, verdict, f"does not derive from {base}")


def _row(owner: Owner, member: Member, sight: Sight) -> Finding:
    seen = sight.names.get(member.name)
    if seen is None and sight.whole:
        return Finding(owner.name, member.name, Verdict.DIFFERENT, "not there")
    if seen is None:
        return Finding(owner.name, member.name, Verdict.UNSEEN, "a class it may come from was not found")
    types = None
    if seen.type is not None and member.kind in ("argument", "field") and not same_type(member.type, seen.type):
        types = (member.type, seen.type)
    return Finding(owner.name, member.name, *_judge(member, seen), types)


def _judge(member: Member, seen: Seen) -> tuple[Verdict, str]:
    if not _same_kind(member, seen):
        return Verdict.DIFFERENT, f"{member.kind} in the table, {seen.kind} there"
    if member.kind == "method" or (member.kind == "attribute" and member.default is REQUIRED):
        return Verdict.EQUAL, ""
    if seen.default is UNREAD:
        return Verdict.UNREAD, ""
    if seen.default == member.default and isinstance(seen.default, bool) == isinstance(member.default, bool):
        return Verdict.EQUAL, ""
    return Verdict.DIFFERENT, f"default {member.default!r} in the table, {seen.default!r} there"


def _same_kind(member: Member, seen: Seen) -> bool:
    if member.kind in ("field", "attribute"):
        return seen.kind in ("argument", "field", "attribute")
    return seen.kind == member.kind


def _too_early_or_late(owner: Owner, present: Collection[str], sight: Sight) -> Iterator[Finding]:
    """Names that the table has in other versions alone, and which are there."""
    lineage = {owner.name, *_ancestors(owner)}
    rows = [row for row in all_members() if row.owner in lineage and row.name not in present]
    for name in sorted({row.name for row in rows}):
        if name in sight.names:
            spans = " and ".join(_span(row.since, row.until) for row in rows if row.name == name)
            yield Finding(owner.name, name, Verdict.DIFFERENT, f"is there; the table has it {spans}")


def _ancestors(owner: Owner) -> Iterator[str]:
    for base in owner.base:
        if base in owners():
            yield base
            yield from _ancestors(owners()[base])


def _owner_spans(owner: Owner) -> str:
    return " and ".join(_span(since, until) for since, until, _ in owner.imports)


def _span(since: str, until: str | None) -> str:
    return f"from {since} on" if until is None else f"from {since} on and before {until}"


def _lines(finding: Finding) -> Iterator[str]:
    label = finding.name or finding.owner
    if finding.verdict is not Verdict.EQUAL:
        text = f": {finding.text}" if finding.text else ""
        yield f"{finding.verdict.value}: {label}{text}"
    if finding.types is not None:
        yield f"type written differently: {label}: {finding.types[0]} in the table, {finding.types[1]} there"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.tensorrt_llm.check", description=(__doc__ or "").splitlines()[0]
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--tree", type=Path, help="a folder with the package tensorrt_llm in it: read, not run")
    place.add_argument("--installed", action="store_true", help="import the installed package (the default)")
    parser.add_argument("--version", help="take the package for this version (default: what it says)")
    parsed = parser.parse_args(arguments)
    try:
        report = check(Tree(parsed.tree) if parsed.tree else Installed(), parsed.version)
    except (FileNotFoundError, ImportError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(report.lines()))
    return 1 if report.of(Verdict.DIFFERENT) else 0


if __name__ == "__main__":
    sys.exit(main())
