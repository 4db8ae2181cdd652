"""TensorRT-LLM's rules, which the fake keeps.

A row of rules.json is a rule with the section of the facts, or the file of TensorRT-LLM's source, that it is from: what
scenarios see on these versions (1.2.1 where none is named), and what is printed. A text is part of what is seen, and an
object has these members, among others. `$model` is a checkpoint and `$engine` an engine of 1.2.1; a scenario with
`which` gets the one or the other by default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.installation import Observer, call

RULES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("rules.json").read_text())
CASES = [
    pytest.param(rule, version, id=f"{rule['rule']} ({version})")
    for rule in RULES
    for version in rule.get("versions", ["1.2.1"])
]


def fits(seen: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return isinstance(seen, dict) and all(fits(seen.get(name), value) for name, value in expected.items())
    if isinstance(expected, list):
        return isinstance(seen, list) and len(seen) == len(expected) and all(map(fits, seen, expected))
    return expected in seen if isinstance(expected, str) and isinstance(seen, str) else bool(seen == expected)


@pytest.mark.parametrize(("rule", "version"), CASES)
def test_the_fake_keeps_the_rule(
    rule: dict[str, Any], version: str, observe: Observer, tiny_stories: Path, engine: Path
) -> None:
    text = json.dumps(rule)
    for name, value in {"$model": str(tiny_stories), "$engine": str(engine), "$version": version}.items():
        text = text.replace(name, value)
    rule = json.loads(text)
    models = {"engine": engine, "torch": tiny_stories}
    calls = [
        call(scenario, **({"model": models[asked["which"]]} if "which" in asked else {}) | asked)
        for scenario, asked in rule["calls"]
    ]
    seen = observe(*calls, version=version, **rule.get("options", {}))
    seen = seen if len(calls) > 1 else [seen]
    for one, expected in zip(seen, rule["sees"], strict=True):
        assert fits(one, expected), (one, expected)
    for printed in rule.get("prints", ()):
        assert printed in observe.printed
