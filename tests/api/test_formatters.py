from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.api import Framer
from djl_trtllm.api.lmi import FORMATTERS
from djl_trtllm.api.presentation import Presentation
from djl_trtllm.batching.request import Finished, FinishReason, Token, Update
from djl_trtllm.errors import GenerationError

from .scripts import EOS, FAILED, PROMPT, STOP, TEXT, TOKENS, answer, several

GOLDEN = Path(__file__).parent / "golden"


def make(name: str, **view: object) -> Framer:
    presentation = Presentation(inputs=PROMPT.text, id="0123", created=1700000000, **view)  # type: ignore[arg-type]
    return FORMATTERS[name](presentation)


def check_golden(name: str, body: bytes) -> None:
    """Compares with the stored answer; UPDATE_GOLDEN=1 stores it."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_bytes(body)
    assert body.decode() == path.read_bytes().decode()


def combinations(*names: str) -> list[tuple[str, ...]]:
    return [chosen for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)]


@pytest.mark.parametrize("view", combinations("details", "tgi_compat", "return_full_text"), ids="-".join)
@pytest.mark.parametrize("name", ["json", "jsonlines", "sse"])
def test_answer_is_as_stored(name: str, view: tuple[str, ...]) -> None:
    # tgi_compat turns details on where the request does not say; here they are apart.
    body = answer(make(name, **dict.fromkeys(view, True)), EOS)
    check_golden("-".join((name, *view)), body)


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("json_chat", {}),
        ("json_chat", {"logprobs": True}),
        ("jsonlines_chat", {}),
        ("jsonlines_chat", {"logprobs": True}),
        ("sse_chat", {"include_usage": True}),
        ("3p", {"return_full_text": True}),
        ("3p_stream", {}),
        ("none", {"stream": True}),
        ("json", {"details": True, "prefill": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_other_answer_is_as_stored(name: str, view: dict[str, bool]) -> None:
    check_golden("-".join((name, *view)), answer(make(name, **view), EOS))


@pytest.mark.parametrize("tgi_compat", [False, True])
@pytest.mark.parametrize("name", ["jsonlines", "sse", "jsonlines_chat", "sse_chat", "3p_stream"])
@pytest.mark.parametrize("ending", ["stop", "error"])
def test_end_without_a_token_is_as_stored(name: str, ending: str, tgi_compat: bool) -> None:
    body = answer(make(name, details=True, tgi_compat=tgi_compat), STOP if ending == "stop" else FAILED)
    check_golden("-".join((name, ending, *(["tgi_compat"] if tgi_compat else []))), body)


@pytest.mark.parametrize("tgi_compat", [False, True])
def test_several_sequences_are_as_stored(tgi_compat: bool) -> None:
    body = answer(make("json", n=3, details=True, tgi_compat=tgi_compat), several(3))
    check_golden("json-n" + ("-tgi_compat" if tgi_compat else ""), body)
    check_golden("json_chat-n", answer(make("json_chat", n=2), several(2)))
    check_golden("sse_chat-n", answer(make("sse_chat", n=2, stream=True), several(2)))


def parse_lines(body: bytes) -> list[dict[str, object]]:
    # As httpx cuts lines: at every character that Unicode calls a line end.
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines()]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


@pytest.mark.parametrize("name", ["jsonlines", "sse", "jsonlines_chat", "sse_chat", "3p_stream"])
def test_no_text_cuts_a_line(name: str) -> None:
    text = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFEFF)))
    lines = parse_lines(answer(make(name), [Update(0, [Token(1, text, 0.0, False)], None), STOP[-1]]))
    assert len(lines) == 2


def test_whole_answers_come_in_one_piece_at_the_end() -> None:
    for name in ("json", "json_chat", "3p", "none"):
        framer = make(name)
        assert not framer.stream
        assert [bool(framer.frame(update)) for update in EOS] == [False, False, False, True]


def test_every_token_is_sent_with_its_update() -> None:
    for name in ("jsonlines", "sse", "jsonlines_chat", "sse_chat", "3p_stream"):
        framer = make(name)
        assert framer.stream
        assert [len(parse_lines(framer.frame(update))) for update in EOS[:3]] == [1, 2, 1]


def test_an_update_without_news_adds_nothing() -> None:
    for name in FORMATTERS:
        assert make(name).frame(Update(0, [], None)) == b""


def test_a_lone_end_repeats_the_last_id_without_text() -> None:
    *_, last = parse_lines(answer(make("jsonlines"), STOP))
    assert last["token"] == {"id": TOKENS[-1].id, "text": "", "log_prob": 0.0, "special_token": True}
    assert last["generated_text"] == TEXT


def test_an_end_without_any_token_has_id_minus_one() -> None:
    (line,) = parse_lines(make("jsonlines").frame(Update(0, [], Finished(FinishReason.CANCELLED, 0, None, None))))
    assert line["token"]["id"] == -1  # type: ignore[index]
    assert line["generated_text"] == ""


def test_a_logprob_that_is_no_number_is_null() -> None:
    (line,) = parse_lines(make("jsonlines").frame(Update(0, [Token(1, "a", float("nan"), False)], None)))
    assert line["token"] == {"id": 1, "text": "a", "log_prob": None}


def test_an_error_before_anything_was_generated_is_framed() -> None:
    for name in ("jsonlines", "sse", "jsonlines_chat", "sse_chat", "3p_stream"):
        *_, last = parse_lines(make(name).error(GenerationError("broken")))
        assert "broken" in json.dumps(last)


def test_after_an_error_other_choices_are_silent() -> None:
    framer = make("sse_chat", n=2)
    assert framer.error(GenerationError("broken")).endswith(b"data: [DONE]\n\n")
    assert framer.frame(several(2)[1]) == b""


def test_huggingface_client_reads_streams() -> None:
    common = pytest.importorskip("huggingface_hub.inference._common")
    body = answer(make("sse", tgi_compat=True, details=True), EOS).decode()
    outputs = list(common._stream_text_generation_response(body.split("\n"), details=True))
    assert "".join(output.token.text for output in outputs) == TEXT
    assert outputs[-1].generated_text == TEXT
    assert outputs[-1].details.finish_reason == "eos_token"
    assert outputs[-1].details.seed == 7
    assert outputs[-1].details.input_length == PROMPT.length
    assert [output.token.special for output in outputs] == [False] * 4 + [True]


def test_huggingface_client_raises_errors_in_streams() -> None:
    common = pytest.importorskip("huggingface_hub.inference._common")
    errors = pytest.importorskip("huggingface_hub.errors")
    body = answer(make("sse", tgi_compat=True), FAILED).decode()
    with pytest.raises(errors.GenerationError, match="died"):
        list(common._stream_text_generation_response(body.split("\n"), details=False))


def test_huggingface_client_reads_chat_streams() -> None:
    common = pytest.importorskip("huggingface_hub.inference._common")
    outputs = list(common._stream_chat_completion_response(answer(make("sse_chat"), EOS).decode().split("\n")))
    assert "".join(output.choices[0].delta.content for output in outputs) == TEXT
    assert outputs[-1].choices[0].finish_reason == "stop"


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
    finished = Finished(FinishReason.LENGTH, len(tokens), None, None)
    updates = [Update(0, group, None) for group in groups]
    if data.draw(st.booleans()):
        updates[-1] = Update(0, groups[-1], finished)
    else:
        updates.append(Update(0, [], finished))
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
        assert "".join(line["token"]["text"] for line in lines) == text  # type: ignore[index]
        assert lines[-1]["generated_text"] == text
        assert not any("generated_text" in line for line in lines[:-1])
    for name in ("jsonlines_chat", "sse_chat"):
        lines = parse_lines(answer(make(name, **view), updates))
        choices = [line["choices"][0] for line in lines]  # type: ignore[index]
        assert "".join(choice["delta"]["content"] for choice in choices) == text
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
    lines = parse_lines(answer(make("3p_stream"), updates))
    assert "".join(line["body"]["generation"] for line in lines) == text  # type: ignore[index]
