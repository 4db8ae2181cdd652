"""Options without effect: the rows of `config/compat/legacy.toml` become declarations as all others are."""

from __future__ import annotations

import re

import pytest

from djl_trtllm.config.options import GROUPS
from djl_trtllm.config.options.legacy import ROWS, with_legacy
from djl_trtllm.config.options.registry import OPTIONS, find
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text

LEGACY = [declared for declared in OPTIONS.values() if declared.option.legacy]


def test_every_row_is_an_option_of_its_group() -> None:
    assert set(ROWS) <= {group.name for group in GROUPS}
    rows = {(group, name) for group, rows in ROWS.items() for name in rows}
    assert {(declared.group.name, declared.name) for declared in LEGACY} == rows
    assert len(rows) > 120


def test_a_value_is_held_against_the_type_and_range_of_its_row() -> None:
    assert from_text("minWorkers=2").options.min_workers == 2
    with pytest.raises(ConfigError, match="a whole number \\(processes\\), at least 0"):
        from_text("minWorkers=-1")
    assert from_text("option.tokenizer_mode=SLOW").options.tokenizer_mode == "slow"
    with pytest.raises(ConfigError, match="one of auto, slow"):
        from_text("option.tokenizer_mode=quick")


def test_a_row_without_a_default_may_be_unset() -> None:
    assert from_text("option.auto_parallel_world_size=none").options.auto_parallel_world_size is None


def test_rows_stand_behind_the_field_that_they_name_and_else_behind_each_other() -> None:
    rows = {"a": {}, "b": {"after": "two"}, "c": {}}
    ROWS["g"] = {name: dict(row) for name, row in rows.items()}
    try:
        assert with_legacy("g", ["one", "two", "three"]) == ["a", "one", "two", "b", "c", "three"]
    finally:
        del ROWS["g"]
    assert with_legacy("no such group", ["one"]) == ["one"]


def test_what_to_use_instead_exists() -> None:
    named = {key for declared in LEGACY for key in re.findall(r"option\.\w+", declared.option.legacy)}
    assert named and {key for key in named if find(key) is None or find(key) in LEGACY} == set()
