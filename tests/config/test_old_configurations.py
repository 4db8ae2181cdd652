"""Configurations as people have them, of every release and server: they resolve as their authors meant.

A folder of `old/` is one: `model/` is what they had, and `expected.json` holds their variables (`environ`), every value
that is not a default (`options`) and parts of the messages that are to be told (`told`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.config import Config, OriginKind, load
from djl_trtllm.config.explain import as_json

OLD = Path(__file__).parent / "old"
CASES = sorted(path.name for path in OLD.iterdir() if path.is_dir())


def resolved(case: str) -> tuple[Config, dict[str, Any]]:
    expected = json.loads((OLD / case / "expected.json").read_text())
    model = OLD / case / "model"
    return load(model if model.is_dir() else None, expected["environ"]), expected


def not_default(config: Config) -> dict[str, Any]:
    """Every value with an origin other than default, as `config --json` prints it."""
    options = as_json(config)["options"]
    return {
        name: str(entry["value"]) if isinstance(entry["value"], list) else entry["value"]
        for name, entry in options.items()
        if entry["origin"]["kind"] != OriginKind.DEFAULT.value
    }


def test_there_are_twenty_of_every_kind() -> None:
    assert len(CASES) >= 20
    assert {case.partition("_")[0] for case in CASES} == {"lmi", "triton", "truss"}


@pytest.mark.parametrize("case", CASES)
def test_it_resolves_as_its_author_meant(case: str) -> None:
    config, expected = resolved(case)
    assert not_default(config) == expected["options"]


@pytest.mark.parametrize("case", CASES)
def test_it_is_answered_as_expected(case: str) -> None:
    config, expected = resolved(case)
    told = "\n".join((*config.warnings, *config.notes))
    for part in expected["told"]:
        assert part in told


@pytest.mark.parametrize("case", CASES)
def test_every_value_says_where_it_came_from(case: str) -> None:
    config, _ = resolved(case)
    for name in config.user_set:
        origin = config.origin(name)
        if origin.kind is OriginKind.FILE:
            assert origin.line is not None
            lines = Path(origin.where).read_text().splitlines()
            assert 1 <= origin.line <= len(lines)


@pytest.mark.parametrize("case", CASES)
def test_no_secret_is_shown(case: str) -> None:
    config, _ = resolved(case)
    shown = json.dumps(as_json(config)) + "\n".join((*config.warnings, *config.notes))
    assert "my_hf_api_key" not in shown and "hf_abc" not in shown
