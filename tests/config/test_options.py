"""The declarations of all options, as tables: what holds of every row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.config import Options
from djl_trtllm.config.options import GROUPS, OPTIONS, ROWS, find, suggest, with_legacy
from djl_trtllm.config.options.choices import Backend, Choice, OptionTypes
from djl_trtllm.config.options.option import NotAValueError, Option, Scope, as_text, option_of
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text
from tests.support.tables import by_table


def test_every_field_is_declared_once() -> None:
    assert len(OPTIONS) > 300
    assert set(OPTIONS) == set(Options.model_fields)
    assert sum(len(group.fields) for group in GROUPS) == len(Options.model_fields)
    # A type has its row in TOML, and stands in the order of the rows.
    effective = [name for name, declared in OPTIONS.items() if not declared.option.legacy]
    assert list(OptionTypes.__annotations__) == effective


def test_every_option_is_documented() -> None:
    lacking = [
        name
        for name, declared in OPTIONS.items()
        if not declared.option.description.endswith(".") or not declared.option.source or not declared.example
    ]
    assert lacking == []


def test_defaults_and_examples_are_values_of_their_options() -> None:
    wrong = []
    for name, declared in OPTIONS.items():
        try:
            declared.type.parse(declared.example, declared.option)
            same = declared.type.check(declared.default, declared.option) == declared.default
            if declared.default is not None:
                same = same and declared.type.parse(as_text(declared.default), declared.option) == declared.default
        except NotAValueError as error:
            wrong.append(f"{name}: {error}")
        else:
            wrong += [] if same else [f"{name}: {declared.default}"]
    assert wrong == []


def test_a_value_alias_is_a_further_word_for_a_value() -> None:
    aliases = [
        (declared, word, value)
        for declared in OPTIONS.values()
        for word, value in declared.option.value_aliases.items()
    ]
    assert len(aliases) > 20
    wrong = []
    for declared, word, value in aliases:
        meaning = declared.type.parse(word, declared.option)
        if meaning is None or meaning != declared.type.parse(value, declared.option) or word in declared.type.choices:
            wrong.append((declared.name, word))
    assert wrong == []


def test_every_word_of_a_closed_set_is_taken_in_either_case() -> None:
    words = [
        (declared, choice, text)
        for declared in OPTIONS.values()
        if declared.option.scope is not Scope.OPERATOR
        for choice in declared.type.choices
        for text in (choice, choice.lower(), choice.upper())
    ]
    assert len(words) > 400
    wrong = []
    for declared, choice, text in words:
        value = getattr(from_text(f"{declared.key}={text}").options, declared.name)
        if value != choice:
            wrong.append((declared.name, text, value))
    assert wrong == []


def test_only_the_operator_decides_about_foreign_code_adapters_keys_certificates_and_where_traces_and_records_go() -> (
    None
):
    operators = "install_requirements adapter_roots api_key api_keys_file cors_allowed_origin certificate_file "
    operators += (
        "private_key_file client_ca_file otlp_traces_endpoint record_file record_share record_prompts record_max_bytes"
    )
    of_scope = {scope: [each for each in OPTIONS.values() if each.option.scope is scope] for scope in Scope}
    assert [declared.name for declared in of_scope[Scope.OPERATOR]] == operators.split()
    servers = [spelling for declared in of_scope[Scope.SERVER] for spelling in declared.spellings]
    assert len(servers) > 20 and not any(spelling.startswith("option.") for spelling in servers)


def test_bounds_include_or_exclude_their_number() -> None:
    closed = Option("k", "d", at_least=1, at_most=3)
    assert [number for number in (0.9, 1, 2, 3, 3.1) if closed.allows(number)] == [1, 2, 3]
    open_ = Option("k", "d", above=1, below=3)
    assert [number for number in (1, 1.1, 2.9, 3) if open_.allows(number)] == [1.1, 2.9]
    assert Option("k", "d").allows(-1e9)
    powers = Option("k", "d", power_of_two=True)
    assert [number for number in (1, 2, 3, 48, 64, 65) if powers.allows(number)] == [1, 2, 64]
    assert [number for number in (-1, 0, 5) if Option("k", "d", at_least=0).allows(number)] == [0, 5]
    assert [number for number in (-1, 0, 5) if Option("k", "d", at_most=0).allows(number)] == [-1, 0]


def test_an_option_says_its_range_and_its_effect_and_without_one_what_happens_instead() -> None:
    bounds: list[tuple[dict[str, Any], str]] = [
        ({"at_least": 1, "at_most": 65535}, "at least 1 and at most 65535"),
        ({"above": 0, "below": 1}, "greater than 0 and less than 1"),
        ({"at_least": 1, "power_of_two": True}, "a power of two and at least 1"),
        ({}, ""),
    ]
    assert [Option("k", "d", **bound).range_text for bound, _ in bounds] == [text for _, text in bounds]
    assert Option("k", "d", effect="E").effect_everywhere == "E"
    assert Option("k", "d").effect_everywhere == "" and Option("k", "d").scope is Scope.MODEL
    assert Option("k", "d", legacy="use another").effect_everywhere == "no effect: use another"
    assert Option("k", "d", legacy="use another", warn=True).effect_everywhere == "no effect any more: use another"


def test_a_row_has_the_key_of_its_field_and_bounds_for_counts_amounts_and_devices() -> None:
    row = {"description": "Tokens.", "default": 7, "aliases": ["option.length"], "count": "tokens"}
    assert option_of("tokens", row) == Option(
        "option.tokens", "Tokens.", unit="tokens", at_least=1, aliases=("option.length",)
    )
    row = {"description": "A port.", "prefix": "", "scope": "server", "today": "nothing"}
    assert option_of("port", row) == Option("port", "A port.", scope=Scope.SERVER, legacy="nothing")
    assert option_of("port", {**row, "key": "its_port"}).key == "its_port"
    bounds = [option_of("n", {"description": "N.", kind: "u"}).range_text for kind in ("amount", "devices")]
    assert bounds == ["greater than 0", "at least 1 and at most 65536"]


def test_a_choice_is_its_word() -> None:
    assert str(Backend.OPENVINO) == Backend.OPENVINO.value == "openvino"
    words = {kind: [member.value.lower() for member in kind] for kind in Choice.__subclasses__()}
    assert len(words) > 20
    assert {kind: all_ for kind, all_ in words.items() if len(set(all_)) < len(all_)} == {}


def test_every_spelling_finds_its_option_only() -> None:
    assert sum(len(declared.option.aliases) for declared in OPTIONS.values()) > 50
    assert [
        spelling for declared in OPTIONS.values() for spelling in declared.spellings if find(spelling) is not declared
    ] == []


@by_table("key", "suggestion")
def test_suggestions(key: str, suggestion: str | None) -> None:
    assert suggest(key) == suggestion


# -- Options without effect: the rows of `config/compat/legacy.toml` become declarations as all others are --


LEGACY = [declared for declared in OPTIONS.values() if declared.option.legacy]


def test_every_row_is_an_option_of_its_group() -> None:
    assert set(ROWS) <= {group.name for group in GROUPS}
    rows = {(group, name) for group, rows in ROWS.items() for name in rows}
    assert {(declared.group.name, declared.name) for declared in LEGACY} == rows
    assert len(rows) > 110


def test_a_value_is_held_against_the_type_and_range_of_its_row() -> None:
    assert from_text("minWorkers=2").options.min_workers == 2
    with pytest.raises(ConfigError, match="a whole number \\(processes\\), at least 0"):
        from_text("minWorkers=-1")
    assert from_text("option.auto_parallel_world_size=none").options.auto_parallel_world_size is None
    assert from_text("option.logits_dtype=FLOAT16").options.logits_dtype == "float16"
    with pytest.raises(ConfigError, match="one of float16, float32"):
        from_text("option.logits_dtype=float8")


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


# -- Every name that the documents of LMI, TensorRT-LLM, Triton and Truss have is an option here --


DOCUMENTED: dict[str, str] = json.loads((Path(__file__).parent / "documented.json").read_text(encoding="utf-8"))
"""The names of options in each document, with blanks between them; those of the server have no prefix."""


def test_every_documented_name_is_an_option() -> None:
    names = {
        (key if name == "server_keys" else f"option.{key}") for name in DOCUMENTED for key in DOCUMENTED[name].split()
    }
    assert len(names) > 290
    assert [name for name in sorted(names) if find(name) is None] == []
