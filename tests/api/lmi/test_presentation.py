from __future__ import annotations

import json
import time
import uuid

from djl_trtllm.api.lmi.presentation import (
    CollectedSequence,
    Presentation,
    SequenceCollector,
    WholeResponseEncoder,
    dump_line,
    lmi_token,
    tgi_token,
)
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
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


def test_sequences_grow_and_end_one_by_one() -> None:
    collector = SequenceCollector(2)
    updates = several(2)
    assert [collector.add(update) for update in updates] == [False, False, False, True]
    assert [sequence.text for sequence in collector.sequences] == ["00 01", "10 11"]
    assert [sequence.finished for sequence in collector.sequences] == [updates[2].finished, updates[3].finished]
    assert CollectedSequence().text == ""


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


def test_a_line_has_no_character_that_ends_a_line() -> None:
    text = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFEFF, 0xE9)))
    line = dump_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert len(line.decode().splitlines()) == 1
    assert dump_line("a\x85é\u2028🦊\u2029") == '"a\\u0085é\\u2028🦊\\u2029"'.encode()
    assert dump_line({"a": [1, None]}) == b'{"a":[1,null]}'


def test_a_token_is_shown_as_its_schema_has_it() -> None:
    plain, special = Token(3, "a", -0.5, False), Token(2, "", None, True)
    assert lmi_token(plain) == {"id": 3, "text": "a", "log_prob": -0.5}
    assert lmi_token(special) == {"id": 2, "text": "", "log_prob": None, "special_token": True}
    assert tgi_token(plain) == {"id": 3, "text": "a", "logprob": -0.5, "special": False}
    assert tgi_token(special) == {"id": 2, "text": "", "logprob": None, "special": True}


def test_a_chunk_may_end_a_sequence_and_add_to_it() -> None:
    collector = SequenceCollector(1)
    finished = SequenceResult(FinishReason.LENGTH, 1, None, None)
    assert collector.add(OutputChunk(0, [Token(1, "a", None, False)], finished))
    assert (collector.sequences[0].text, collector.sequences[0].finished) == ("a", finished)
