from __future__ import annotations

import pytest

from djl_trtllm.bench.streams import Counted, EventReader, Reader, Stream, TokenReader


def read(reader: Reader, *pieces: bytes) -> Stream:
    """Feed pieces, each a second after the one before, and end."""
    for second, piece in enumerate(pieces):
        reader.feed(piece, float(second))
    reader.end()
    return reader.stream


def event(text: str = "", tokens: int | None = None, prompt: int = 5) -> bytes:
    usage = "null" if tokens is None else f'{{"prompt_tokens":{prompt},"completion_tokens":{tokens}}}'
    return f'data: {{"choices":[{{"delta":{{"content":"{text}"}}}}],"usage":{usage}}}\n\n'.encode()


def last(tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % tokens


def test_a_line_is_a_token_and_a_line_that_is_cut_is_read_with_the_next() -> None:
    whole = b'{"token":{"id":3},"generated_text":"abc"}\n'
    stream = read(TokenReader(Stream(0.0)), b'{"token":{"id":1}}\n{"tok', b'en":{"id":2}}\n' + whole)
    assert (list(stream.times), list(stream.counts)) == ([0.0, 1.0], [1, 2])
    assert (stream.tokens, stream.counted, stream.error) == (3, Counted.EACH, None)


def test_a_text_that_looks_like_a_token_is_none() -> None:
    stream = read(TokenReader(Stream(0.0)), b'{"token":{"id":1,"text":"{\\"token\\": 2}"}}\n')
    assert stream.tokens == 1


@pytest.mark.parametrize(
    "line",
    [
        b'{"token":{"id":-1,"error_msg":"the engine failed"},"details":{}}\n',
        b'data:{"error":"the engine failed","error_type":"generation"}\n\n',
    ],
    ids=["lmi", "tgi"],
)
def test_an_error_in_a_stream_of_tokens_is_no_token(line: bytes) -> None:
    stream = read(TokenReader(Stream(0.0)), b'{"token":{"id":1}}\n', line)
    assert stream.error == "error in the stream: the engine failed"
    assert stream.tokens == 1


def test_a_text_about_errors_is_no_error() -> None:
    stream = read(TokenReader(Stream(0.0)), b'{"token":{"id":1,"text":"\\"error_msg\\""},"generated_text":"a"}\n')
    assert (stream.error, stream.tokens) == (None, 1)


def test_the_usage_of_each_event_says_how_many_tokens_it_has() -> None:
    stream = read(EventReader(Stream(0.0)), event("", 0), event("a", 1), event("bcd", 4), last(5))
    assert list(zip(stream.times, stream.counts, strict=True)) == [(1.0, 1), (2.0, 3), (3.0, 1)]
    assert (stream.tokens, stream.prompt_tokens, stream.counted) == (5, 5, Counted.USAGE)


def test_several_events_that_arrive_together_are_one_arrival() -> None:
    stream = read(EventReader(Stream(0.0)), event("a", 1) + event("b", 2), event("c", 3))
    assert list(stream.counts) == [2, 1]


def test_a_first_event_with_the_role_alone_is_no_token() -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    stream = read(EventReader(Stream(0.0)), role, event("a"), event("b"), last(2))
    assert list(stream.times) == [1.0, 2.0]
    assert stream.counted is Counted.EACH


def test_usage_at_the_end_is_spread_over_the_events() -> None:
    stream = read(EventReader(Stream(0.0)), event("a"), event("b"), last(5))
    assert (stream.tokens, sum(stream.counts), stream.counted) == (5, 5, Counted.TOTAL)
    assert sorted(stream.counts) == [2, 3]


def test_without_usage_the_requested_length_is_the_count_where_it_is_known() -> None:
    stream = read(
        EventReader(Stream(0.0, requested=8)), b'data: {"text_output":"a"}\n\n', b'data: {"text_output":"b"}\n'
    )
    assert (list(stream.counts), stream.counted) == ([4, 4], Counted.REQUESTED)


def test_a_usage_of_no_tokens_is_no_number() -> None:
    """LitServe's streams end with one."""
    stream = read(EventReader(Stream(0.0)), event("a"), event("b"), last(0))
    assert (stream.tokens, stream.error, stream.prompt_tokens) == (2, None, 5)


def test_without_any_number_events_are_counted() -> None:
    stream = read(EventReader(Stream(0.0)), event("a"), b'data: {"choices":[{"text":"b"}]}\n\n')
    assert (stream.tokens, stream.counted) == (2, Counted.EVENTS)


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_reasoning_is_output(field: str) -> None:
    stream = read(EventReader(Stream(0.0)), f'data: {{"choices":[{{"delta":{{"{field}":"a"}}}}]}}\n'.encode())
    assert stream.tokens == 1


def test_the_arguments_of_a_tool_call_are_output() -> None:
    stream = read(EventReader(Stream(0.0)), b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n')
    assert stream.tokens == 1


def test_an_error_event_has_its_message() -> None:
    stream = read(EventReader(Stream(0.0)), event("a"), b'data: {"error":{"message":"too long","code":400}}\n\n')
    assert stream.error == "error in the stream: too long"


def test_lmis_lines_of_a_chat_are_events_too() -> None:
    line = b'{"choices":[{"delta":{"content":"a"}}]}\n'
    assert list(read(EventReader(Stream(0.0)), line, line).times) == [0.0, 1.0]


def test_an_event_that_is_no_json_is_an_error() -> None:
    stream = read(EventReader(Stream(0.0)), event("a"), b"data: {nonsense\n\n")
    assert stream.error is not None and "nonsense" in stream.error


CUT = "the response ended before its last token"
TOKEN = b'{"token":{"id":1,"text":"a"}}\n'


@pytest.mark.parametrize(
    ("reader", "last", "error"),
    [
        (TokenReader, b"", CUT),
        (TokenReader, b'data:{"token":{"id":2},"generated_text":null,"details":null}\n', CUT),
        (TokenReader, b'{"token":{"id":2,"text":"\\"generated_text\\": 1"}}\n', CUT),
        (TokenReader, b'data:{"token":{"id":2},"generated_text":"ab","details":null}\n\n', None),
        (TokenReader, b'{"token": {"id": 2}, "generated_text": ""}\n', None),
        (EventReader, event("b"), CUT),
        (EventReader, b"data: [DONE]\n\n", None),
        (EventReader, b'{"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\n', None),
        (EventReader, b'{"choices":[{"delta":{"content":"b"},"finish_reason":null}]}\n', CUT),
    ],
)
def test_a_response_is_whole_only_with_its_last_token(reader: type[Reader], last: bytes, error: str | None) -> None:
    stream = read(reader(Stream(0.0, requested=9)), TOKEN if reader is TokenReader else event("a"), last, b"\n")
    assert stream.error == error


def test_tritons_events_have_no_last_one() -> None:
    assert read(EventReader(Stream(0.0)), b'data: {"text_output":"a"}\n\n').error is None


@pytest.mark.parametrize(
    ("reader", "last"),
    [
        (TokenReader, b'{"token":{"id":2},"generated_text":"ab"}'),
        (EventReader, b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}'),
    ],
)
def test_a_last_line_without_its_end_is_read(reader: type[Reader], last: bytes) -> None:
    stream = read(reader(Stream(0.0)), TOKEN if reader is TokenReader else event("a"), last)
    assert (list(stream.times), stream.error) == ([0.0, 1.0], None)


def test_what_came_in_place_of_a_stream_is_told() -> None:
    stream = read(EventReader(Stream(0.0)), b'{"error":{"message":"no such model"}}')
    assert stream.error == "error in the stream: no such model"
    stream = read(EventReader(Stream(0.0)), b"<html>")
    assert (stream.error, stream.detail) == ("a response without tokens", "<html>")


def test_an_error_before_the_first_token_is_no_arrival() -> None:
    assert list(read(TokenReader(Stream(0.0)), b'{"token":{"error_msg":"no"}}\n').times) == []


def test_the_text_of_an_error_is_bounded() -> None:
    reader = Reader(Stream(0.0))
    for _ in range(3):
        reader.feed(b"x" * (1 << 19), 0.0)
    assert len(reader.body) == 1 << 20


@pytest.mark.parametrize("kind", [TokenReader, EventReader])
def test_a_response_without_tokens_is_an_error(kind: type[Reader]) -> None:
    assert read(kind(Stream(0.0)), b": comment\n\n").error == "a response without tokens"


def test_tokens_that_arrive_together_share_the_time_before_them() -> None:
    stream = Stream(0.0)
    for now, tokens in ((1.0, 2), (1.5, 1), (2.5, 4)):
        stream.add(now, tokens)
    assert stream.intervals() == [0.5, 0.25, 0.25, 0.25, 0.25]
