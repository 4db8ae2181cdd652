from __future__ import annotations

from djl_trtllm.config.compat.triton_names import (
    ENGINE_MODEL,
    EXAMPLES,
    IGNORED,
    MODELS,
    OPTION_OF,
    STRUCTURE,
    TO_FILL,
    TRITON_ONLY,
)
from djl_trtllm.config.options.registry import find


def test_every_name_is_an_option() -> None:
    assert len(OPTION_OF) > 20
    assert {name: key for name, key in OPTION_OF.items() if find(key) is None} == {}


def test_the_engines_model_counts_first() -> None:
    assert MODELS[0] == ENGINE_MODEL
    assert set(TO_FILL) == set(MODELS)


def test_what_is_to_be_filled_in_has_an_example_and_is_a_name() -> None:
    names = {name for fields in TO_FILL.values() for name in fields}
    assert names == set(EXAMPLES)
    assert names <= set(OPTION_OF)


def test_a_name_has_one_meaning() -> None:
    kinds = (set(OPTION_OF), set(IGNORED), STRUCTURE, TRITON_ONLY)
    assert sum(map(len, kinds)) == len(set().union(*kinds))
