from __future__ import annotations

import json
import time
import uuid

from djl_trtllm.api.lmi.presentation import (
    Presentation,
    WholeResponseEncoder,
    lmi_token,
    tgi_token,
)
from djl_trtllm.request import Token
from tests.api.scripts import EOS, FAILED, FAILURE, PROMPT, TEXT, several


class Texts(WholeResponseEncoder):
    """The texts of all sequences, and what the presentation shows of the prompt."""

    def _body(self) -> bytes:
        view = self._presentation
        texts = [sequence.text for sequence in self._output.sequences]
        return json.dumps([view.inputs, view.prompt_length, len(view.prompt_tokens), texts]).encode()


def test_a_presentation_takes_over_what_tokenising_found_out() -> None:
    view = Presentation(inputs="before")
    view.begin(PROMPT)
    assert (view.inputs, view.prompt_length, view.prompt_tokens) == (PROMPT.text, PROMPT.length, ())
    view = Presentation(prefill=True)
    view.begin(PROMPT)
    assert view.prompt_tokens == PROMPT.tokens


def test_a_presentation_has_an_id_of_its_own_and_the_time() -> None:
    before = int(time.time())
    one, other = Presentation(), Presentation()
    assert one.id != other.id and uuid.UUID(hex=one.id).hex == one.id
    assert before <= one.created <= time.time()


def test_a_presentation_shows_one_text_and_nothing_else_unless_it_is_asked() -> None:
    view = Presentation()
    assert (view.inputs, view.n, view.prompt_length, view.prompt_tokens) == ("", 1, 0, ())
    assert not any(
        (
            view.stream,
            view.details,
            view.return_full_text,
            view.prefill,
            view.tgi_compat,
            view.logprobs,
            view.include_usage,
        )
    )


def test_a_whole_answer_is_made_when_every_sequence_has_ended() -> None:
    encoder = Texts(Presentation(n=2))
    assert (encoder.stream, encoder.content_type, encoder.wants_prompt_tokens) == (False, "application/json", False)
    encoder.begin(PROMPT)
    assert [encoder.encode(update) for update in several(2)][:-1] == [b"", b"", b""]
    encoder = Texts(Presentation(prefill=True))
    assert encoder.wants_prompt_tokens
    encoder.begin(PROMPT)
    *none, body = [encoder.encode(update) for update in EOS]
    assert none == [b"", b"", b""]
    assert json.loads(body) == [PROMPT.text, PROMPT.length, len(PROMPT.tokens), [TEXT]]


def test_a_whole_answer_that_failed_has_no_bytes() -> None:
    encoder = Texts(Presentation())
    assert [encoder.encode(update) for update in FAILED] == [b"", b""]
    assert encoder.error(FAILURE) == b""


def test_a_token_is_shown_as_its_schema_has_it() -> None:
    plain, special = Token(3, "a", -0.5, False), Token(2, "", None, True)
    assert lmi_token(plain) == {"id": 3, "text": "a", "log_prob": -0.5}
    assert lmi_token(special) == {"id": 2, "text": "", "log_prob": None, "special_token": True}
    assert tgi_token(plain) == {"id": 3, "text": "a", "logprob": -0.5, "special": False}
    assert tgi_token(special) == {"id": 2, "text": "", "logprob": None, "special": True}
