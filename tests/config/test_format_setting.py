from __future__ import annotations

from djl_trtllm.config.format_setting import format_setting
from tests.engines.helpers import configured


def test_an_option_is_cited_with_its_value_and_where_that_came_from() -> None:
    config = configured(max_seq_len=256)
    assert format_setting(config, "max_seq_len") == "option.max_seq_len=256 (environment variable OPTION_MAX_SEQ_LEN)"
    assert format_setting(config, "max_input_len") == "option.max_input_len=1024 (default)"


def test_an_option_without_a_value_is_none() -> None:
    assert format_setting(configured(), "quantize") == "option.quantize=none (default)"
