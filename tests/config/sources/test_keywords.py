from __future__ import annotations

import pytest

from djl_trtllm.config.sources.keywords import as_arguments
from djl_trtllm.errors import ConfigError


def test_values_are_written_as_in_a_file() -> None:
    given = {"max_input_len": 5, "option.enable_lora": True, "inference_port": 81, "stop_in_engine": None}
    assert as_arguments(given) == ["max_input_len=5", "option.enable_lora=true", "inference_port=81"]


def test_what_is_no_option_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as refused:
        as_arguments({"max_input_length": 5, "zzz": 1, "max_input_len": 2})
    length, unknown = refused.value.problems
    assert length == "max_input_length is not an option; did you mean max_input_len?"
    assert unknown == "zzz is not an option; docs/options.md has the options there are"


def test_the_caller_may_refuse_a_name_with_its_own_reason() -> None:
    with pytest.raises(ConfigError) as refused:
        as_arguments(
            {"max_input_len": 5, "zzz": 1}, lambda name: f"{name}: not here" if name == "max_input_len" else None
        )
    assert refused.value.problems[0] == "max_input_len: not here"
    assert "zzz is not an option" in refused.value.problems[1]
