from __future__ import annotations

import pytest

from djl_trtllm.config import (
    Backend,
    parse_properties,
    read_environment,
    resolve,
)
from djl_trtllm.config.origin import Origin
from djl_trtllm.errors import ConfigError

from .helpers import from_text


def test_replace_keeps_the_rest_and_remembers_the_origin() -> None:
    config = from_text("option.max_input_len=10")
    sized = config.replace(Origin.derived("the table of max_num_tokens"), max_num_tokens=8192)
    assert sized.options.max_num_tokens == 8192
    assert sized.options.max_input_len == 10
    assert not sized.is_set("max_num_tokens")
    served = config.replace(Origin.override("command line --port"), port=9, backend="openvino", predict_timeout=5)
    assert served.is_set("port")
    assert served.options.backend is Backend.OPENVINO
    assert isinstance(served.options.predict_timeout, float)
    assert str(served.origin("port")) == "command line --port"


def test_replace_checks_its_values() -> None:
    with pytest.raises(ConfigError) as caught:
        from_text("").replace(Origin.override("test"), port=-1, no_such_option=1, tgi_compat=3, max_input_len=True)
    assert len(caught.value.problems) == 4


def test_the_same_sources_can_be_resolved_twice() -> None:
    sources = [*read_environment({"OPTION_MAX_NUM_TOKENS": "9"}), parse_properties("option.dtype=half", "f")]
    assert resolve(sources) == resolve(sources)


def test_origin_of_an_unknown_field_is_a_key_error() -> None:
    config = from_text("")
    with pytest.raises(KeyError):
        config.origin("max_inputlen")
    with pytest.raises(KeyError):
        config.is_set("max_inputlen")
