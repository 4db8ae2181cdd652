from __future__ import annotations

from djl_trtllm.config import resolve
from djl_trtllm.config.compat.foreign_format import presets as presets_of
from djl_trtllm.config.compat.truss_names import (
    BUILD_PRESETS,
    ENGINE_PRESETS,
    IGNORED,
    MARKS,
    OPTION_OF,
    QUANTIZATION,
    STACK_PRESETS,
    TO_ACT_ON,
)
from djl_trtllm.config.options.registry import find


def test_every_name_is_an_option() -> None:
    presets = {**BUILD_PRESETS, **ENGINE_PRESETS, **STACK_PRESETS}
    keys = [*OPTION_OF.values(), *presets, *(key for settings in QUANTIZATION.values() for key in settings)]
    assert len(keys) > 60
    assert [key for key in keys if find(key) is None] == []


def test_presets_and_quantisations_have_values_that_their_options_take() -> None:
    for settings in (BUILD_PRESETS, ENGINE_PRESETS, STACK_PRESETS, *QUANTIZATION.values()):
        config = resolve([presets_of("Truss", dict(settings))])
        assert config.warnings == () and settings


def test_a_name_has_one_meaning() -> None:
    assert sorted(OPTION_OF.keys() & IGNORED.keys()) == []


def test_the_answers_to_act_on_are_answers() -> None:
    assert set(IGNORED.values()) >= TO_ACT_ON and len(TO_ACT_ON) == 4


def test_the_marks_are_keys_that_a_truss_has() -> None:
    names = {name.partition(".")[0] for name in (*OPTION_OF, *IGNORED)}
    assert set(MARKS) - names == {"secrets"}
