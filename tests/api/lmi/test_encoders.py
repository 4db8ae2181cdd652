"""The LMI schema's answers: json, jsonlines, sse and none."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.api.lmi.encoders import PlainTextEncoder
from djl_trtllm.api.lmi.presentation import Presentation
from djl_trtllm.errors import GenerationError, RequestTimeoutError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.scripts import (
    EOS,
    FAILED,
    FAILURE,
    PROMPT,
    STOP,
    TEXT,
    TOKENS,
    answer,
    check_golden,
    client_lines,
    make,
    parse_lines,
    several,
)


def combinations(*names: str) -> list[tuple[str, ...]]:
    return [chosen for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)]


@pytest.mark.parametrize("view", combinations("details", "tgi_compat", "return_full_text"), ids="-".join)
@pytest.mark.parametrize("name", ["json", "jsonlines", "sse"])
def test_answer_is_as_stored(name: str, view: tuple[str, ...]) -> None:
    # tgi_compat turns details on where the request does not say; here they are apart.
    body = answer(make(name, **dict.fromkeys(view, True)), EOS)
    check_golden("-".join((name, *view)), body)


def test_plain_text_is_as_stored() -> None:
    check_golden("none-stream", answer(make("none", stream=True), EOS))


def test_the_prompts_tokens_are_as_stored() -> None:
    check_golden("json-details-prefill", answer(make("json", details=True, prefill=True), EOS))


@pytest.mark.parametrize("tgi_compat", [False, True])
@pytest.mark.parametrize("name", ["jsonlines", "sse"])
@pytest.mark.parametrize("ending", ["stop", "error"])
def test_end_without_a_token_is_as_stored(name: str, ending: str, tgi_compat: bool) -> None:
    body = answer(make(name, details=True, tgi_compat=tgi_compat), STOP if ending == "stop" else FAILED)
    check_golden("-".join((name, ending, *(["tgi_compat"] if tgi_compat else []))), body)


@pytest.mark.parametrize("tgi_compat", [False, True])
def test_several_sequences_are_as_stored(tgi_compat: bool) -> None:
    body = answer(make("json", n=3, details=True, tgi_compat=tgi_compat), several(3))
    check_golden("json-n" + ("-tgi_compat" if tgi_compat else ""), body)
    assert body == answer(make("json", n=3, tgi_compat=tgi_compat), several(3))


def test_a_stream_shows_the_prompts_tokens_in_its_details() -> None:
    *_, last = parse_lines(answer(make("jsonlines", details=True, prefill=True), EOS))
    assert last["details"]["prefill"] == [
        {"id": 1, "text": "", "log_prob": None, "special_token": True},
        {"id": 450, "text": "The", "log_prob": None},
        {"id": 281, "text": " wolf", "log_prob": None},
    ]
    *_, last = parse_lines(answer(make("sse", details=True, prefill=True, tgi_compat=True), EOS))
    assert last["details"]["prefill"][0] == {"id": 1, "text": "", "logprob": None, "special": True}


def test_whole_answers_come_in_one_piece_at_the_end() -> None:
    for name in ("json", "none"):
        encoder = make(name)
        assert not encoder.stream
        assert [bool(encoder.encode(update)) for update in EOS] == [False, False, False, True]


def test_every_token_is_sent_with_its_update() -> None:
    for name in ("jsonlines", "sse"):
        encoder = make(name)
        assert encoder.stream
        assert [len(parse_lines(encoder.encode(update))) for update in EOS] == [1, 2, 1, 1]
    encoder = make("none", stream=True)
    assert encoder.stream
    assert [encoder.encode(update).decode() for update in EOS] == [TOKENS[0].text, TOKENS[2].text, TOKENS[3].text, ""]


def test_media_types() -> None:
    names = ("json", "jsonlines", "sse", "none")
    assert [make(name).content_type for name in names] == [
        "application/json",
        "application/jsonlines",
        "text/event-stream",
        "text/plain",
    ]


def test_the_prompts_tokens_are_wanted_where_they_are_shown() -> None:
    for name in ("json", "jsonlines", "sse"):
        assert make(name, prefill=True).wants_prompt_tokens and not make(name).wants_prompt_tokens
    assert not make("none", prefill=True).wants_prompt_tokens


def test_a_chunk_without_news_adds_nothing() -> None:
    for name in ("json", "jsonlines", "sse", "none"):
        for tgi_compat in (False, True):
            assert make(name, tgi_compat=tgi_compat).encode(OutputChunk(0, [], None)) == b""


def test_several_tokens_may_end_together() -> None:
    finished = SequenceResult(FinishReason.LENGTH, 2, None, None)
    encoder = make("jsonlines", details=True)
    encoder.begin(PROMPT)
    first, last = parse_lines(encoder.encode(OutputChunk(0, TOKENS[:2], finished)))
    assert (first["token"]["id"], last["token"]["id"]) == (TOKENS[0].id, TOKENS[1].id)
    assert last["generated_text"] == TOKENS[0].text + TOKENS[1].text
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 2, "inputs": PROMPT.text}


def test_a_special_token_in_mid_stream_is_marked() -> None:
    (line,) = parse_lines(make("jsonlines").encode(OutputChunk(0, [Token(7, "", -1.0, True)], None)))
    assert line["token"] == {"id": 7, "text": "", "log_prob": -1.0, "special_token": True}
    (line,) = parse_lines(make("jsonlines", tgi_compat=True).encode(OutputChunk(0, [Token(7, "", -1.0, True)], None)))
    assert line["token"] == {"id": 7, "text": "", "logprob": -1.0, "special": True}


@pytest.mark.parametrize("tgi_compat", [False, True])
def test_a_lone_end_repeats_the_last_id_without_text(tgi_compat: bool) -> None:
    *_, last = parse_lines(answer(make("jsonlines", tgi_compat=tgi_compat), STOP))
    assert (last["token"]["id"], last["token"]["text"]) == (TOKENS[-1].id, "")
    assert last["token"]["special" if tgi_compat else "special_token"] is True
    assert last["token"]["logprob" if tgi_compat else "log_prob"] == 0.0
    assert last["generated_text"] == TEXT


def test_an_end_without_any_token_has_id_minus_one() -> None:
    (line,) = parse_lines(
        make("jsonlines").encode(OutputChunk(0, [], SequenceResult(FinishReason.CANCELLED, 0, None, None)))
    )
    assert line == {
        "token": {"id": -1, "text": "", "log_prob": 0.0, "special_token": True},
        "generated_text": "",
    }


def test_a_logprob_that_is_no_number_is_null() -> None:
    (line,) = parse_lines(make("jsonlines").encode(OutputChunk(0, [Token(1, "a", float("nan"), False)], None)))
    assert line["token"] == {"id": 1, "text": "a", "log_prob": None}


def test_an_error_is_the_last_line_with_what_came_before_it() -> None:
    first, second, last = parse_lines(answer(make("jsonlines"), FAILED))
    assert (first["token"]["id"], second["token"]["id"]) == (TOKENS[0].id, TOKENS[1].id)
    assert last == {
        "token": {"id": -1, "text": "", "log_prob": -1.0, "special_token": True, "error_msg": str(FAILURE)},
        "generated_text": TOKENS[0].text,
        "details": {"finish_reason": "error"},
    }


def test_an_error_in_details_counts_the_tokens() -> None:
    encoder = make("jsonlines", details=True, tgi_compat=True)
    encoder.begin(PROMPT)
    encoder.encode(EOS[0])
    encoder.encode(EOS[1])
    (last,) = parse_lines(encoder.error(RequestTimeoutError("too late")))
    assert last["details"] == {
        "finish_reason": "error",
        "generated_tokens": 3,
        "inputs": PROMPT.text,
        "seed": None,
        "input_length": PROMPT.length,
    }
    assert (last["error"], last["error_type"]) == ("too late", "incomplete_generation")


def test_an_error_before_anything_was_generated_is_framed() -> None:
    for name in ("jsonlines", "sse"):
        (last,) = parse_lines(make(name).error(GenerationError("broken")))
        assert last["token"]["error_msg"] == "broken" and "error" not in last


def test_whole_answers_and_plain_text_cannot_tell_an_error() -> None:
    encoder = make("json")
    assert b"".join([encoder.encode(update) for update in FAILED]) == b""
    assert encoder.error(FAILURE) == b""
    for stream in (False, True):
        encoder = make("none", stream=stream)
        assert encoder.encode(FAILED[0]).decode() == (TOKENS[0].text if stream else "")
        with pytest.raises(GenerationError, match="died"):
            encoder.encode(FAILED[1])
        assert encoder.error(FAILURE) == b""


def test_plain_text_has_the_prompt_before_it_once_where_that_is_asked_for() -> None:
    for stream in (False, True):
        view = Presentation(inputs="as it was sent", stream=stream, return_full_text=True)
        assert answer(PlainTextEncoder(view), EOS).decode() == PROMPT.text + TEXT


def test_of_several_sequences_plain_text_is_the_best_and_whole() -> None:
    encoder = make("none", n=2, stream=True)
    assert not encoder.stream
    assert answer(encoder, several(2)) == b"00 01"


@pytest.mark.parametrize("name", ["jsonlines", "sse"])
def test_no_text_cuts_a_line(name: str) -> None:
    text = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFEFF)))
    lines = parse_lines(answer(make(name), [OutputChunk(0, [Token(1, text, 0.0, False)], None), STOP[-1]]))
    assert [line["token"]["text"] for line in lines] == [text, ""]


# -- clients -----------------------------------------------------------------------------------------------------------


def test_huggingface_client_reads_streams() -> None:
    common = pytest.importorskip("huggingface_hub.inference._common")
    body = answer(make("sse", tgi_compat=True, details=True), EOS)
    outputs = list(common._stream_text_generation_response(client_lines(body), details=True))
    assert "".join(output.token.text for output in outputs) == TEXT
    assert outputs[-1].generated_text == TEXT
    assert outputs[-1].details.finish_reason == "eos_token"
    assert outputs[-1].details.seed == 7
    assert outputs[-1].details.input_length == PROMPT.length
    assert [output.token.special for output in outputs] == [False] * 4 + [True]


def test_huggingface_client_raises_errors_in_streams() -> None:
    common = pytest.importorskip("huggingface_hub.inference._common")
    errors = pytest.importorskip("huggingface_hub.errors")
    body = answer(make("sse", tgi_compat=True), FAILED)
    with pytest.raises(errors.GenerationError, match="died"):
        list(common._stream_text_generation_response(client_lines(body), details=False))


# -- any text ----------------------------------------------------------------------------------------------------------

texts = st.lists(
    st.text(st.characters(codec="utf-8") | st.sampled_from('\n\r"\\\x85\u2028\u2029'), max_size=8),
    max_size=12,
)


@given(texts, st.data())
def test_every_answer_parses_and_joins_to_the_same_text(pieces: list[str], data: st.DataObject) -> None:
    special = st.booleans()
    tokens = [Token(i, piece, -float(i), piece == "" and data.draw(special)) for i, piece in enumerate(pieces)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    bounds = [0, *cuts, len(tokens)]
    groups = [tokens[start:end] for start, end in itertools.pairwise(bounds)]
    finished = SequenceResult(FinishReason.LENGTH, len(tokens), None, None)
    updates = [OutputChunk(0, group, None) for group in groups]
    if data.draw(st.booleans()):
        updates[-1] = OutputChunk(0, groups[-1], finished)
    else:
        updates.append(OutputChunk(0, [], finished))
    text = "".join(pieces)
    view = {
        "details": data.draw(st.booleans()),
        "tgi_compat": data.draw(st.booleans()),
        "logprobs": data.draw(st.booleans()),
    }

    whole = json.loads(answer(make("json", **view), updates))
    assert (whole[0] if view["tgi_compat"] else whole)["generated_text"] == text
    assert json.loads(answer(make("json_chat", **view), updates))["choices"][0]["message"]["content"] == text
    assert json.loads(answer(make("3p", **view), updates))["body"]["generation"] == text
    for stream in (False, True):
        assert answer(make("none", stream=stream), updates).decode() == text
    for name in ("jsonlines", "sse"):
        lines = parse_lines(answer(make(name, **view), updates))
        assert "".join(line["token"]["text"] for line in lines) == text
        assert lines[-1]["generated_text"] == text
        assert not any("generated_text" in line for line in lines[:-1])
    for name in ("jsonlines_chat", "sse_chat"):
        lines = parse_lines(answer(make(name, **view), updates))
        choices = [line["choices"][0] for line in lines]
        assert "".join(choice["delta"]["content"] for choice in choices) == text
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
    lines = parse_lines(answer(make("3p_stream"), updates))
    assert "".join(line["body"]["generation"] for line in lines) == text
