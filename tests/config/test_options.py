"""The declarations of all options, as tables: what holds of every row."""

from __future__ import annotations

import pydantic
import pytest

from djl_trtllm.config import Options
from djl_trtllm.config.options import GROUPS
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.config.options.values import NotAValueError, as_text
from tests.config.helpers import from_text


def test_every_field_is_declared_once() -> None:
    assert len(OPTIONS) > 300
    assert set(OPTIONS) == set(Options.model_fields)
    assert sum(len(group.fields) for group in GROUPS) == len(Options.model_fields)


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


def test_options_are_frozen_and_refuse_unknown_names() -> None:
    options = Options()
    with pytest.raises(pydantic.ValidationError):
        options.port = 1
    with pytest.raises(pydantic.ValidationError):
        Options(no_such_option=1)


def test_only_the_operator_decides_about_foreign_code_adapters_keys_certificates_and_where_traces_go() -> None:
    assert [name for name, declared in OPTIONS.items() if declared.option.scope is Scope.OPERATOR] == [
        "install_requirements",
        "adapter_roots",
        "api_key",
        "api_keys_file",
        "certificate_file",
        "private_key_file",
        "client_ca_file",
        "otlp_traces_endpoint",
    ]


def test_only_option_keys_belong_to_option_variables() -> None:
    servers = [declared for declared in OPTIONS.values() if declared.option.scope is Scope.SERVER]
    assert len(servers) > 20
    assert [spelling for declared in servers for spelling in declared.spellings if spelling.startswith("option.")] == []


def test_what_early_engines_had_and_todays_have_not_is_retired() -> None:
    assert {name for name, declared in OPTIONS.items() if declared.option.legacy} >= {
        "use_custom_all_reduce",
        "enable_trt_overlap",
        "baichuan_model_version",
        "multi_query_mode",
        "trtllm_checkpoint_path",
        "num_checkpoint_workers",
        "num_engine_workers",
        "load_by_shard",
        "auto_parallel",
    }
