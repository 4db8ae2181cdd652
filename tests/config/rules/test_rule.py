"""How rules are added and checked."""

from __future__ import annotations

from djl_trtllm.config.rules.context import RuleContext, context_of
from djl_trtllm.config.rules.rule import Rule, Severity, adder, check
from tests.config.helpers import from_text


def test_a_rule_has_the_name_of_its_function() -> None:
    rules: list[Rule] = []

    @adder(rules)(("dtype",), "never", Severity.NOTE, "no", "document", needs_model=True)
    def never(context: RuleContext) -> str | None:
        return context.wrote("dtype")

    assert rules == [Rule("never", ("dtype",), "never", Severity.NOTE, "no", "document", never, True)]


def test_a_broken_rule_is_reported_by_its_severity() -> None:
    context = context_of(from_text(""), None, None)

    def rule(severity: Severity, message: str | None) -> Rule:
        return Rule("name", (), "always", severity, "no", "document", lambda _: message)

    found = check(
        context,
        [
            rule(Severity.ERROR, "an error"),
            rule(Severity.WARNING, "a warning"),
            rule(Severity.NOTE, "a note"),
            rule(Severity.ERROR, None),
            Rule("name", (), "held by its values", Severity.ERROR, "no", "document"),
        ],
    )
    assert (found.problems, found.warnings, found.notes) == (["an error"], ["a warning"], ["a note"])
