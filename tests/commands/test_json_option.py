"""JSON on the command line."""

from __future__ import annotations

import pytest

from djl_trtllm.commands.json_option import json_object
from djl_trtllm.errors import DjlTrtllmError


def test_an_object_is_read() -> None:
    assert json_object("--parameters", '{"top_k": 3}') == {"top_k": 3}


@pytest.mark.parametrize(("text", "reason"), [("[1]", "not an object"), ("{", "Expecting property name")])
def test_other_text_is_refused_with_the_option_and_the_reason(text: str, reason: str) -> None:
    with pytest.raises(DjlTrtllmError) as refused:
        json_object("--parameters", text)
    assert str(refused.value).startswith(f"--parameters {text}: expected a JSON object: {reason}")
