from __future__ import annotations

import pydantic
import pytest

from djl_trtllm.config import Backend, Options
from djl_trtllm.config.option import Scope
from djl_trtllm.config.options import GROUPS
from djl_trtllm.config.registry import OPTIONS, find, suggest
from djl_trtllm.config.values import as_text


def test_every_field_is_declared_once() -> None:
    assert set(OPTIONS) == set(Options.model_fields)
    assert sum(len(group.__annotations__) for _, group in GROUPS) == len(Options.model_fields)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_option_is_documented(name: str) -> None:
    declared = OPTIONS[name]
    option = declared.option
    assert option.description.endswith(".") and option.source
    for backend in Backend:
        assert option.effect_on(backend), backend
    assert declared.example, "an option without a default value needs an example"
    if option.retired:
        assert not (option.effect or option.tensorrt or option.pytorch or option.openvino)
        assert option.effect_on(Backend.AUTO) == f"no effect any more: {option.retired}"
    if option.effect:
        assert not (option.tensorrt or option.pytorch or option.openvino)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_defaults_examples_and_aliases_are_values(name: str) -> None:
    declared = OPTIONS[name]
    declared.type.check(declared.default, declared.option)
    declared.type.parse(declared.example, declared.option)
    if declared.default is not None:
        assert declared.type.parse(as_text(declared.default), declared.option) == declared.default
    for word, value in declared.option.value_aliases.items():
        assert declared.type.parse(word, declared.option) == declared.type.parse(value, declared.option)
        assert word not in declared.type.choices


def test_options_are_frozen_and_refuse_unknown_names() -> None:
    options = Options()
    with pytest.raises(pydantic.ValidationError):
        options.port = 1
    with pytest.raises(pydantic.ValidationError):
        Options(no_such_option=1)  # type: ignore[call-arg]


def test_only_the_operator_decides_about_foreign_code_at_load() -> None:
    assert [name for name, declared in OPTIONS.items() if declared.option.scope is Scope.OPERATOR] == [
        "install_requirements"
    ]


def test_aliases_find_their_option() -> None:
    for spelling in ("option.enable_prefix_caching", "option.enable_block_reuse", "option.enable_kv_cache_reuse"):
        declared = find(spelling)
        assert declared is not None and declared.name == "enable_kv_cache_reuse"


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("option.max_rolling_batch_sise", "option.max_rolling_batch_size"),
        ("tensor_parallel_degree", "option.tensor_parallel_degree"),
        ("option.job_queue_size", "job_queue_size"),
        ("option.MODELNAME", "option.modelName"),
        ("option.max-input-len", "option.max_input_len"),
        ("zzz", None),
        ("", None),
    ],
)
def test_suggestions(key: str, suggestion: str | None) -> None:
    assert suggest(key) == suggestion
