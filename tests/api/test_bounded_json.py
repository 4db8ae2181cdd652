"""The JSON of a request is counted before it is read."""

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
    read_json,
)
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError
from tests.support.tables import by_rows, by_table


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


@by_rows("data", [b"", b"[", b"]" * 40_000, b'"' * 40_001, b"{]" * 20_000, b"\\" * 40_000, b"\xff" * 40_000])
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
