from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from djl_trtllm.api import base as json_body
from djl_trtllm.api.base import (
    MOST_LEVELS,
    MOST_WORK,
    OF_A_BACKSLASH,
    OF_A_BYTE,
    OF_A_CONTAINER,
    OF_A_TEXT_BYTE,
    SMALL,
    Call,
    CollectedSequence,
    Dialect,
    RawRequest,
    SequenceCollector,
    WholeEncoder,
    dump_line,
    read_json,
)
from djl_trtllm.api.dialects.openai.dialect import OPENAI
from djl_trtllm.api.dialects.tgi import TGI
from djl_trtllm.api.registry import LMI
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    AuthenticationError,
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, Sampling, SequenceResult, Token
from tests.api.scripts import FAILED, FAILURE, answer, several
from tests.support.models import WordEncoder
from tests.support.plugin import TRIAL
from tests.support.tables import by_table


def test_a_request_has_the_content_type_of_its_headers() -> None:
    assert RawRequest(b"", {}).content_type is None
    assert RawRequest(b"", {"content-type": "text/plain"}).content_type == "text/plain"


def test_a_call_counts_the_sequences_of_all_its_requests() -> None:
    requests = tuple(GenerationRequest(sampling=Sampling(n=n, best_of=7)) for n in (1, 3))
    assert Call(requests, WordEncoder()).sequences == 4


@pytest.mark.parametrize(
    ("dialect", "statuses"),
    [
        # Invalid, no key, overloaded, not ready, too late, one that no table names, a defect.
        (TRIAL, (400, 401, 511, 512, 504, 500, 514)),
        (OPENAI, (400, 401, 511, 512, 504, 500, 514)),
        (LMI, (424, 401, 511, 512, 513, 424, 514)),
        (TGI, (422, 401, 429, 503, 500, 424, 514)),
    ],
)
def test_the_servers_options_change_the_statuses_of_its_state(dialect: Dialect, statuses: tuple[int, ...]) -> None:
    options = Options(
        throttle_error_http_code=511, wlm_error_http_code=512, timeout_http_code=513, server_error_http_code=514
    )
    errors = (
        InvalidRequestError(""),
        AuthenticationError(""),
        OverloadedError("", queue_depth=0, capacity=0, retry_after=1),
        NotReadyError(""),
        RequestTimeoutError(""),
        RequestError(""),
        ValueError(""),
    )
    assert tuple(dialect.encode_error(error, options).status for error in errors) == statuses


@by_table("message", "parameter")
def test_openais_errors_name_the_parameter_if_there_is_one(message: str, parameter: bytes) -> None:
    assert b'"param":' + parameter in OPENAI.encode_error(InvalidRequestError(message), Options()).body
    assert b'"param":null' in OPENAI.encode_error(GenerationError(message), Options()).body


def test_sequences_grow_and_end_one_by_one() -> None:
    collector = SequenceCollector(2)
    updates = several(2)
    assert [collector.add(update) for update in updates] == [False, False, False, True]
    assert [sequence.text for sequence in collector.sequences] == ["00 01", "10 11"]
    assert [sequence.finished for sequence in collector.sequences] == [updates[2].finished, updates[3].finished]
    assert CollectedSequence().text == ""


def test_a_line_has_no_character_that_ends_a_line() -> None:
    text = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFEFF, 0xE9)))
    line = dump_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert len(line.decode().splitlines()) == 1
    assert dump_line("a\x85é\u2028🦊\u2029") == '"a\\u0085é\\u2028🦊\\u2029"'.encode()
    assert dump_line({"a": [1, None]}) == b'{"a":[1,null]}'


def test_each_generation_has_its_own_sequences() -> None:
    collector = SequenceCollector(2, 2)
    for generation, first in ((1, "c"), (0, "a")):
        for index in (0, 1):
            finished = SequenceResult(FinishReason.LENGTH, 1, None, None)
            token = Token(1, chr(ord(first) + index), None, False)
            done = collector.add(OutputChunk(index, [token], finished, generation))
    assert done
    assert [each.text for each in collector.sequences] == ["a", "b", "c", "d"]


class Texts(WholeEncoder):
    """The texts of all sequences."""

    def _body(self) -> bytes:
        return " ".join(sequence.text for sequence in self._output.sequences).encode()


def test_a_whole_answer_comes_when_every_sequence_has_ended() -> None:
    encoder = Texts(2)
    assert (encoder.stream, encoder.content_type, encoder.wants_prompt_tokens) == (False, "application/json", False)
    assert [encoder.encode(chunk) for chunk in several(2)] == [b"", b"", b"", b"00 01 10 11"]
    batch = [chunk for generation in range(3) for chunk in several(2, generation)]
    encoder = Texts(2, 3)
    assert [encoder.encode(chunk) for chunk in batch] == [b""] * 11 + [b" ".join([b"00 01 10 11"] * 3)]


def test_a_whole_answer_never_comes_with_an_error() -> None:
    assert answer(Texts(1), FAILED) == Texts(1).error(FAILURE) == b""


def padded(data: bytes) -> bytes:
    """The same, long enough to be counted in pieces."""
    return data + b" " * (SMALL + 1)


@pytest.mark.parametrize("pad", [bytes, padded])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_levels_are_bounded(pad: Any, opening: bytes, closing: bytes) -> None:
    assert read_json(pad(opening * (MOST_LEVELS - 1) + b"[]" + closing * (MOST_LEVELS - 1))) is not None
    with pytest.raises(InvalidRequestError, match=f"nested deeper than {MOST_LEVELS} levels"):
        read_json(pad(opening * MOST_LEVELS + b"[]" + closing * MOST_LEVELS))


def test_levels_are_counted_across_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def nested(levels: int) -> bytes:
        return b"[" * (levels - 1) + b"[],[[]]" + b"]" * (levels - 1)

    for at_once in (1, 7, 100):
        monkeypatch.setattr(json_body, "_BRACKETS_AT_ONCE", at_once)
        read_json(padded(b"[" + b",".join([nested(MOST_LEVELS - 2)] * 3) + b"]"))
        with pytest.raises(InvalidRequestError, match="deeper"):
            read_json(padded(b"[" + b",".join([b"[]", nested(MOST_LEVELS - 1)]) + b"]"))


def test_a_wide_body_is_not_a_deep_one() -> None:
    assert len(read_json(b"[" + b",".join([b"[{}]"] * 1000) + b"]")) == 1000


@by_table("item", "work", "what")
def test_what_there_is_to_read_is_counted_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, item: bytes, work: int, what: str
) -> None:
    around = OF_A_CONTAINER + OF_A_BYTE  # the list's own brackets, and a comma less than items
    most = (MOST_WORK - around) // work
    assert len(read_json(b"[" + b",".join([item] * most) + b"]")) == most
    monkeypatch.setattr(json_body, "orjson", None)
    with pytest.raises(InvalidRequestError, match=rf"too much JSON to read, .*\d {what}.*several requests"):
        read_json(b"[" + b",".join([item] * (most + 1)) + b"]")


def test_prompts_of_any_length_in_use_are_read() -> None:
    ids = list(range(100_000, 100_000 + 200_000))
    assert read_json(orjson.dumps({"prompt": ids})) == {"prompt": ids}
    messages = [{"role": "user", "content": "the wolf"}] * 10_000
    assert read_json(orjson.dumps({"messages": messages})) == {"messages": messages}


def test_texts_are_counted_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = MOST_WORK // (OF_A_TEXT_BYTE + OF_A_BACKSLASH) & ~1
    escapes = b'"' + b"\\" * (size - 100) + b'"'
    assert len(read_json(escapes)) == (size - 100) // 2
    monkeypatch.setattr(json_body, "orjson", None)
    with pytest.raises(InvalidRequestError, match=rf"texts of {size + 2} bytes with {size} backslashes"):
        read_json(b'"' + b"\\" * size + b'"')


@pytest.mark.parametrize("text", [b"a", b"the wolf\\n"])
def test_bodies_that_the_operator_allows_to_be_larger_may_be_texts(text: bytes) -> None:
    assert read_json(b'["' + text * (20_000_000 // len(text)) + b'"]')


def test_a_text_of_the_largest_default_body_is_read() -> None:
    text = "\U0001f43a" * ((Options().max_request_size - 100) // 12)
    assert read_json(json.dumps({"inputs": text}).encode()) == {"inputs": text}


def test_a_long_text_may_have_any_marks() -> None:
    text = 'a "quoted" \\ [text], {of} all marks\n' * 20_000
    assert read_json(orjson.dumps({"inputs": text})) == {"inputs": text}


@pytest.mark.parametrize(
    "data", [b"", b"[", b"]" * 40_000, b'"' * 40_001, b"{]" * 20_000, b"\\" * 40_000, b"\xff" * 40_000]
)
def test_what_is_no_json_is_told_so(data: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        read_json(data)


def test_marks_in_texts_are_not_counted_wherever_a_piece_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(0)
    texts = ["a,b[{", "\\\\", '"', '\\"[,', "é\n", "", "x" * 9]

    def value(depth: int = 0) -> Any:
        kind = source.random()
        if depth > 5 or kind < 0.4:
            return source.choice([1, None, *texts])
        count = source.randrange(6)
        if kind < 0.7:
            return [value(depth + 1) for _ in range(count)]
        return {f"{place}{source.choice(texts)}": value(depth + 1) for place in range(count)}

    def containers(data: Any) -> int:
        if isinstance(data, dict):
            return 1 + sum(map(containers, data.values()))
        return 1 + sum(map(containers, data)) if isinstance(data, list) else 0

    for piece in (2, 3, 7):
        monkeypatch.setattr(json_body, "_PIECE", piece)
        for _ in range(300):
            made = value()
            brackets = json_body._count(orjson.dumps(made))
            assert brackets.count(b"[") + brackets.count(b"{") == containers(made)
