"""What a rule between options is, and how rules are checked."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from djl_trtllm.config.rules.context import RuleContext

Broken = Callable[[RuleContext], str | None]


class Severity(enum.Enum):
    """The result of a broken rule: an error refuses the configuration, a note is only shown."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Rule:
    """One rule.

    `options` are names of fields, `condition` describes the rule, and `broken` returns a message, or None if the rule
    holds. `lifted` describes whether today's engines still have the rule; `document` is its source. If `broken` is
    None, the type of the option checks the rule. `needs_model` rules wait until the model's files are known.
    """

    name: str
    options: tuple[str, ...]
    condition: str
    severity: Severity
    lifted: str
    document: str
    broken: Broken | None = None
    needs_model: bool = False


def adder(rules: list[Rule]) -> Callable[..., Callable[[Broken], Broken]]:
    """A decorator that adds the rule which its function checks to `rules`, under the function's name; see `Rule`."""

    def rule(
        options: tuple[str, ...],
        condition: str,
        severity: Severity,
        lifted: str,
        document: str,
        needs_model: bool = False,
    ) -> Callable[[Broken], Broken]:
        def add(broken: Broken) -> Broken:
            rules.append(Rule(broken.__name__, options, condition, severity, lifted, document, broken, needs_model))
            return broken

        return add

    return rule


@dataclass
class Findings:
    """Messages of broken rules, by severity."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(context: RuleContext, rules: Iterable[Rule]) -> Findings:
    found = Findings()
    into: Mapping[Severity, list[Any]] = {
        Severity.ERROR: found.problems,
        Severity.WARNING: found.warnings,
        Severity.NOTE: found.notes,
    }
    for rule in rules:
        message = rule.broken(context) if rule.broken is not None else None
        if message is not None:
            into[rule.severity].append(message)
    return found
