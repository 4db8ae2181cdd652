"""Bodies that are objects, with a text in them."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api import RawRequest
from djl_trtllm.api.parameters import Problems, check_text, read_object
from djl_trtllm.errors import InvalidRequestError


def test_a_body_is_an_object() -> None:
    assert read_object(RawRequest(b'{"a": 1}', {})) == {"a": 1}
    with pytest.raises(InvalidRequestError, match=r"^the body is 3: expected a JSON object$"):
        read_object(RawRequest(b"3", {}))
    with pytest.raises(InvalidRequestError, match=r"expected a JSON object with 'prompt'$"):
        read_object(RawRequest(b"[]", {}), "prompt")


@pytest.mark.parametrize(("payload", "shown"), [({}, "null"), ({"prompt": ""}, '""'), ({"prompt": "a"}, None)])
def test_a_text_is_there_and_not_empty(payload: dict[str, Any], shown: str | None) -> None:
    problems = Problems()
    check_text(payload, "prompt", problems)
    expected = [] if shown is None else [f"'prompt' is {shown}: expected a text that is not empty"]
    assert problems.invalid == expected


def test_a_text_that_is_wrong_otherwise_is_refused_once() -> None:
    problems = Problems()
    problems.invalid.append("'prompt' is 3: expected a text")
    check_text({}, "prompt", problems)
    assert len(problems.invalid) == 1
