from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.sizing.config_values import first_positive, listed, model_type, part, positive


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 3), (1, 1), (0, None), (-1, None), (True, None), (2.5, None), ("3", None)]
)
def test_only_whole_numbers_above_zero_are_sizes(value: Any, expected: int | None) -> None:
    assert positive({"a": value}, "a") == expected


def test_the_first_name_with_a_size_counts() -> None:
    assert first_positive({"b": 2, "c": 3}, ("a", "b", "c")) == 2
    assert first_positive({}, ("a",)) is None


def test_what_is_of_another_type_is_absent() -> None:
    assert (listed({"a": [1]}, "a"), listed({"a": "x"}, "a"), listed({}, "a")) == ([1], (), ())
    assert (part({"a": {"b": 1}}, "a"), part({"a": []}, "a")) == ({"b": 1}, {})
    assert (model_type({"model_type": "llama"}), model_type({"model_type": [1]})) == ("llama", "")
