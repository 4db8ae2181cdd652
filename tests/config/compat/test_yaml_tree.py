from __future__ import annotations

import re

import pytest
import yaml

from djl_trtllm.config.compat import yaml_tree
from djl_trtllm.config.compat.foreign_format import ForeignSetting as Entry
from djl_trtllm.config.compat.foreign_format import FormatError
from djl_trtllm.config.compat.yaml_tree import entries


def test_every_value_has_the_path_of_its_keys_and_its_line() -> None:
    text = "a: 1\nb:\n  c: x\n  d:\n    e: 'two words'\n"
    assert entries(text) == [
        Entry("a", "1", 1),
        Entry("b.c", "x", 3),
        Entry("b.d.e", "two words", 5),
    ]


def test_a_list_is_one_entry_for_each_member() -> None:
    text = "a:\n  - 1\n  - {b: 2}\n  - [3, 4]\n"
    assert entries(text) == [
        Entry("a", "1", 2),
        Entry("a.b", "2", 3),
        Entry("a", "3", 4),
        Entry("a", "4", 4),
    ]


def test_null_and_empty_collections_have_no_value() -> None:
    assert entries("a: null\nb: ~\nc:\nd: {}\ne: []\nf: ''\ng: 'null'\n") == [
        *(Entry(name, "", line) for line, name in enumerate("abcdef", 1)),
        Entry("g", "null", 7),
    ]
    assert entries("") == entries("# nothing\n") == []


def test_an_alias_stands_for_what_it_names() -> None:
    assert entries("a: &x {b: 1}\nc: *x\n") == [Entry("a.b", "1", 1), Entry("c.b", "1", 1)]


DEEP = "".join(f"{'  ' * depth}a:\n" for depth in range(60))
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcde", "bcdef", strict=True)
)


NO_YAML = "this is not YAML: .*"
TABS = "; indent with spaces, not with tabs"
QUOTES = "; put quotes around the value"
CHECK = "; check the indentation and the colons of this line and the one before"
TOO_DEEP = "more than 50 nested levels"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb:\n\tc: 1\n", 3, NO_YAML + TABS),
        ("a: 1\nb: @x\n", 2, NO_YAML + CHECK),
        ("a: 1\n@b: 2\n", 2, NO_YAML + QUOTES),
        ("a: 1\n  `b: 2\n", 2, NO_YAML + QUOTES),
        ("a:\n  - b\n  %c\n", 3, NO_YAML + QUOTES),
        ("a: [1\n", 2, NO_YAML + CHECK),
        ("a: 1\nb: c: d\n", 2, "this is not YAML: mapping values are not allowed here" + CHECK),
        ("a: b: c\t\n", 1, NO_YAML + CHECK),
        ("a: \x00\n", 1, NO_YAML),
        ("\n- a\n", 2, "expected `key: value` lines"),
        ("text\n", 1, "expected `key: value` lines"),
        ("a: 1\n? [b]\n: 2\n", 2, "a key must be a scalar"),
        ("a: 1\nb: {c: 1,\n c: 2}\n", 3, "c is here and on line 2; keep one"),
        (DEEP, 52, TOO_DEEP),
        ("a: " + "[" * 51 + "1" + "]" * 51, 1, TOO_DEEP),
        ("a: " + "[" * 5_000, 1, "this is not YAML: its values are nested too deep"),
        (BOMB, 1, "more than 20000 values"),
    ],
    ids=lambda value: None if isinstance(value, str) and len(value) > 60 else value,
)
def test_a_mistake_is_reported_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        entries(text)
    assert re.fullmatch(says, str(caught.value), re.DOTALL), str(caught.value)
    assert caught.value.line == line


def test_an_error_without_a_place_is_on_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str, **options: object) -> None:
        raise yaml.MarkedYAMLError(context="somewhere")

    monkeypatch.setattr(yaml, "compose", fail)
    with pytest.raises(FormatError) as caught:
        entries("a: 1")
    assert (str(caught.value), caught.value.line) == ("this is not YAML: somewhere" + CHECK, 1)


def test_as_many_levels_and_values_as_there_may_be_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{'  ' * depth}a:\n" for depth in range(50))
    assert entries(text) == [Entry(".".join("a" * 50), "", 50)]
    assert entries("a: " + "[" * 49 + "1" + "]" * 49) == [Entry("a", "1", 1)]
    monkeypatch.setattr(yaml_tree, "_MOST_VALUES", 3)
    assert len(entries("a: [1, 2, 3]")) == 3
    with pytest.raises(FormatError, match="more than 3 values"):
        entries("a: [1, 2, 3, 4]")
