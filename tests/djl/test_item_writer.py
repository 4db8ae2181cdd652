"""The answer to one request, in items."""

from __future__ import annotations

import pytest

from djl_trtllm.api import Call
from djl_trtllm.config import Options
from djl_trtllm.djl.item import Item
from djl_trtllm.djl.item_writer import ItemWriter
from djl_trtllm.errors import GenerationError, InvalidRequestError, OverloadedError
from djl_trtllm.request import GenerationRequest, Sampling
from djl_trtllm.telemetry import ServedRequest
from tests.support.word_encoder import WordEncoder, chunk

JSON = ("Content-Type", "application/json")
WORDS = ("Content-Type", "text/words")
END = Item(last=True)


class Answered:
    """An answer and its items."""

    def __init__(self, encoder: WordEncoder | None = None, *, sequences: int = 1) -> None:
        self.items: list[Item] = []
        self.encoder = encoder or WordEncoder()
        self.served = ServedRequest("r-1", "DJL", "/invocations")
        self.told: list[tuple[int | str, str]] = []
        self.answer = ItemWriter(self.items.append, Options(throttle_error_http_code=529), self.served, self._tell)
        request = GenerationRequest(sampling=Sampling(n=sequences))
        self.answer.expect(Call((request,), self.encoder))

    def _tell(self, served: ServedRequest) -> None:
        self.told.append((served.status, served.error))


def test_every_chunk_is_an_item_and_the_first_says_what_they_are() -> None:
    answered = Answered()
    for each in (chunk("a"), chunk(" wolf"), chunk(ends=True)):
        assert not answered.answer.complete
        answered.answer.deliver(each)
    assert answered.answer.complete
    assert answered.items == [Item(b"a", properties=(WORDS,)), Item(b" wolf"), Item(b"."), END]
    assert answered.told == [(200, "")]


def test_the_headers_of_a_call_come_with_the_first_item() -> None:
    answered, warning = Answered(), ("Warning", "299 - ignored")
    answered.answer.expect(Call((GenerationRequest(),), answered.encoder, (warning,)))
    for each in (chunk("a"), chunk(ends=True)):
        answered.answer.deliver(each)
    assert [item.properties for item in answered.items] == [(WORDS, warning), (), ()]


def test_a_chunk_without_bytes_is_no_item_unless_it_is_the_last() -> None:
    class Silent(WordEncoder):
        def encode(self, chunk: object) -> bytes:
            return b""

    answered = Answered(Silent())
    answered.answer.deliver(chunk("a"))
    assert answered.items == []
    answered.answer.deliver(chunk(ends=True))
    assert answered.items == [Item(b"", True, properties=(WORDS,))]


def test_an_answer_is_complete_with_all_its_sequences() -> None:
    answered = Answered(sequences=2)
    complete = []
    for each in (chunk("a", ends=True, index=1), chunk("b", ends=True)):
        answered.answer.deliver(each)
        complete.append(answered.answer.complete)
    assert complete == [False, True]
    assert [item.last for item in answered.items] == [False, False, True]


def test_nothing_comes_after_the_last_item() -> None:
    answered = Answered()
    answered.answer.deliver(chunk("a", ends=True))
    answered.answer.deliver(chunk("b"))
    answered.answer.fail(InvalidRequestError("late"))
    assert answered.items == [Item(b"a.", properties=(WORDS,)), END]
    assert answered.told == [(200, "")]


def test_an_error_before_anything_was_sent_is_a_status() -> None:
    answered = Answered()
    answered.answer.deliver(chunk(error=OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)))
    assert answered.answer.complete
    assert answered.items == [Item(b"", True, 529, "full", (JSON, ("Retry-After", "7")))]
    assert answered.told == [(529, "OverloadedError")]


def test_an_error_in_a_stream_is_encoded_as_its_dialect_does() -> None:
    answered = Answered()
    answered.answer.deliver(chunk("a"))
    answered.answer.deliver(chunk(" wolf", error=GenerationError("the engine failed")))
    assert answered.items == [Item(b"a", properties=(WORDS,)), Item(b" wolf?"), END]


def test_a_request_that_could_not_be_read_is_refused() -> None:
    items: list[Item] = []
    served = ServedRequest("r-1", "DJL", "/invocations")
    told: list[ServedRequest] = []
    ItemWriter(items.append, Options(), served, told.append).fail(InvalidRequestError("no such field"))
    assert (told, served.status, served.error) == ([served], 424, "InvalidRequestError")
    assert items == [Item(b"", True, 424, "no such field", (JSON,))]


@pytest.mark.parametrize("last", [b"!", b""], ids=["told by its dialect", "by DJL"])
def test_a_formatter_that_refuses_in_a_stream_has_its_last_word(last: bytes) -> None:
    answered = Answered(WordEncoder(last=last))
    answered.answer.deliver(chunk("a"))
    answered.encoder.failure = InvalidRequestError("no such field")
    answered.answer.deliver(chunk("b"))
    assert answered.answer.complete
    assert answered.items[1:] == ([Item(b"!"), END] if last else [Item(b"", True, 424, "no such field", (JSON,))])


@pytest.mark.parametrize("begun", [True, False])
def test_a_defect_is_for_the_log_and_not_for_the_client(caplog: pytest.LogCaptureFixture, begun: bool) -> None:
    answered = Answered()
    if begun:
        answered.answer.deliver(chunk("a"))
    answered.encoder.failure = KeyError("secret")
    answered.answer.deliver(chunk("b"))
    told = "Internal server error, see the server's log."
    assert answered.items[-1] == Item(b"", True, 500, told, (JSON,))
    assert "secret" in caplog.text


def test_a_refusal_is_not_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    Answered().answer.fail(InvalidRequestError("no such field"))
    assert caplog.records == []
