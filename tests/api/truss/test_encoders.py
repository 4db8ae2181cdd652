from __future__ import annotations

import json

import pytest

from djl_trtllm.api.truss.encoders import TextEncoder, WholeTextEncoder
from djl_trtllm.errors import GenerationError
from tests.api.scripts import EOS, FAILED, FAILURE, STOP, TEXT, answer


def test_a_stream_is_the_text_in_pieces() -> None:
    for script in (EOS, STOP):
        assert answer(TextEncoder(), script).decode() == TEXT
    encoder = TextEncoder()
    assert [bool(encoder.encode(chunk)) for chunk in EOS] == [True, True, True, False]


def test_a_whole_answer_is_an_object() -> None:
    assert json.loads(answer(WholeTextEncoder(), EOS)) == {"text": TEXT}


def test_text_has_no_place_for_an_error() -> None:
    encoder = TextEncoder()
    encoder.encode(FAILED[0])
    with pytest.raises(GenerationError):
        encoder.encode(FAILED[1])
    assert encoder.error(FAILURE) == b""


def test_a_whole_answer_never_comes_with_an_error() -> None:
    assert answer(WholeTextEncoder(), FAILED) == WholeTextEncoder().error(FAILURE) == b""


def test_the_caller_knows_how_to_send_them() -> None:
    assert (TextEncoder().stream, TextEncoder().content_type) == (True, "application/octet-stream")
    assert (WholeTextEncoder().stream, WholeTextEncoder().content_type) == (False, "application/json")
    assert not TextEncoder().wants_prompt_tokens and not WholeTextEncoder().wants_prompt_tokens
