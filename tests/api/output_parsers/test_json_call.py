from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.api.output_parsers.json_call import CallArguments, CallReader, CallStart, Status, ValueEnd

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def read(text: str, reader: CallReader | None = None) -> tuple[Status, int, list[Any], str]:
    reader = reader or CallReader()
    events: list[Any] = []
    taken = 0
    for char in text:
        step = reader.read(char, events)
        taken += step
        if not step:
            break
    started = [event.name for event in events if isinstance(event, CallStart)]
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    return reader.status, taken, [*started, arguments] if started else [], reader.text


@given(VALUES, st.sampled_from([",", "}", " ", "]"]), st.integers(1, 5))
def test_the_end_of_a_value_is_found(value: Any, after: str, size: int) -> None:
    raw = json.dumps(value)
    end, text = ValueEnd(raw[0]), raw + after
    for start in range(0, len(text), size):
        found = end.find(text[: start + size], start)
        if found is not None:
            assert (found, end.broken) == (len(raw), False)
            return
    raise AssertionError(text)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), st.text(min_size=1, max_size=5))
def test_arguments_are_passed_on_as_they_are(arguments: dict[str, Any], name: str) -> None:
    raw = json.dumps(arguments)
    text = f'{{"name": {json.dumps(name)}, "arguments": {raw}}}'
    assert read(text + "rest") == (Status.DONE, len(text), [name, raw], "")
    text = f'{{ "parameters" : {raw} ,"name":{json.dumps(name)} }}'
    assert read(text + "}") == (Status.DONE, len(text), [name, raw], "")


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("x", 0),
        ("{x", 1),
        ('{"name" "f"', 8),
        ('{"name": }', 9),
        ('{"name": "f"; ', 12),
        ("{}", 1),
        ('{"arguments": {}}', 16),
        ('{"arguments": {}, "name": "g"}', 29),
        ('{"wolf": 1}', 7),
        ('{"name": tru,', 12),
        ('{"id": <', 7),
        ('{"arguments": {<', 15),
    ],
)
def test_what_cannot_be_a_call_fails_where_that_is_seen(text: str, taken: int) -> None:
    reader = CallReader({"f"})
    status, at, events, read_text = read(text, reader)
    assert (status, at, events, read_text) == (Status.FAILED, taken, [], text[:taken])


def test_a_call_that_has_started_cannot_fail() -> None:
    text = '{"name": "f", "arguments": {"a": 1}'
    assert read(text + " wolf") == (Status.DONE, len(text) + 1, ["f", '{"a": 1}'], "")
    assert read('{"name": "f", "arguments": {"a": <')[:3] == (Status.DONE, 33, ["f", '{"a": '])
    assert read(text + ', "name": 3, "arguments": {"b": 2}, "id": 4}')[0:3:2] == (Status.DONE, ["f", '{"a": 1}'])


def test_arguments_alone_end_with_their_object() -> None:
    assert read('{"a": {}}x', CallReader.of_arguments("f")) == (Status.DONE, 9, ["f", '{"a": {}}'], "")


def test_deep_arguments_are_no_error() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    reader = CallReader()
    reader.read(f'{{"arguments": {deep}', [])
    assert reader.status is Status.FAILED
