from __future__ import annotations

from djl_trtllm.engine.citing import cited

from .helpers import configured


def test_an_option_is_cited_with_its_value_and_where_that_came_from() -> None:
    config = configured(max_seq_len=256)
    assert cited(config, "max_seq_len") == "option.max_seq_len=256 (environment variable OPTION_MAX_SEQ_LEN)"
    assert cited(config, "max_input_len") == "option.max_input_len=1024 (default)"


def test_an_option_without_a_value_is_none() -> None:
    assert cited(configured(), "quantize") == "option.quantize=none (default)"
