from __future__ import annotations

from collections import deque

import pytest

from djl_trtllm.api import Call
from djl_trtllm.config import Options
from djl_trtllm.djl.items import Item, ItemWriter, take
from djl_trtllm.errors import GenerationError, InvalidRequestError, OverloadedError
from djl_trtllm.request import GenerationRequest, OutputChunk, Sampling
from djl_trtllm.telemetry import ServedRequest, Telemetry
from tests.support.djl import Reader
from tests.support.models import WordEncoder, chunk

END = Item(last=True)


def test_a_part_of_an_answer_is_two_pairs() -> None:
    encoded = Item("der böse Wolf".encode()).encode()
    assert encoded == (
        b"\x00\x02\x00\x00\x00\x04data\x00\x00\x00\x0eder b\xc3\xb6se Wolf\x00\x00\x00\x04last\x00\x00\x00\x05false"
    )
    assert Reader(Item(b"a wolf", True).encode()).pairs() == {"data": "a wolf", "last": "true"}


def test_an_error_is_four_pairs_without_data() -> None:
    encoded = Item(b"not sent", False, 503, "völlig voll").encode()
    assert Reader(encoded).pairs() == {"code": "503", "error": "völlig voll", "data": "", "last": "true"}
    assert list(Reader(encoded).pairs()) == ["code", "error", "data", "last"]


BROKEN = Item(b"", True, 500, "broken")


@pytest.mark.parametrize(
    ("items", "taken"),
    [
        (
            [Item(b"a", properties=(("A", "1"),)), Item(b" wolf"), Item(b".", properties=(("B", "2"),))],
            [Item(b"a wolf.", False, None, "", (("A", "1"), ("B", "2")))],
        ),
        ([Item(b"a"), Item(b"."), END], [Item(b"a."), END]),
        ([Item(b"a"), Item(b"b"), BROKEN], [Item(b"ab"), BROKEN]),
        ([BROKEN, Item(b"a")], [BROKEN, Item(b"a")]),
    ],
)
def test_items_of_a_request_travel_as_one_but_for_its_end_and_an_error(items: list[Item], taken: list[Item]) -> None:
    waiting = deque(items)
    assert [take(waiting) for _ in taken] == taken
    assert not waiting


JSON = ("Content-Type", "application/json")
WORDS = ("Content-Type", "text/words")


class Told(Telemetry):
    """Keeps what is reported: the status and the error at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int | str, str]] = []

    def ended_soon(self, request: ServedRequest) -> None:
        self.told.append((request.status, request.error))


class Answered:
    """An answer and its items."""

    def __init__(self, encoder: WordEncoder | None = None, *, sequences: int = 1) -> None:
        self.items: list[Item] = []
        self.encoder = encoder or WordEncoder()
        self.served = ServedRequest("r-1", "DJL", "/invocations")
        telemetry = Told()
        self.told = telemetry.told
        self.answer = ItemWriter(self.items.append, Options(throttle_error_http_code=529), self.served, telemetry)
        self.request = GenerationRequest(sampling=Sampling(n=sequences))
        self.expect()

    def expect(self, *headers: tuple[str, str]) -> None:
        self.answer.expect(Call((self.request,), self.encoder, headers))


class Silent(WordEncoder):
    def encode(self, chunk: object) -> bytes:
        return b""


FULL = OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)


@pytest.mark.parametrize(
    ("sequences", "chunks", "items", "ended"),
    [
        (1, [chunk("a"), chunk(" wolf"), chunk(ends=True)], [b"a", b" wolf", b".", END], (200, "")),
        (1, [chunk("a", ends=True), chunk("b")], [b"a.", END], (200, "")),
        (2, [chunk("a", ends=True, index=1), chunk("b", ends=True)], [b"a.", b"b.", END], (200, "")),
        (1, [chunk("a"), chunk(" b", error=GenerationError("failed"))], [b"a", b" b?", END], (200, "")),
        (
            *(1, [chunk(error=FULL)]),
            *([Item(b"", True, 529, "full", (JSON, ("Retry-After", "7")))], (529, "OverloadedError")),
        ),
    ],
)
def test_every_chunk_is_an_item_until_the_response_is_complete_and_the_first_says_what_they_are(
    sequences: int,
    chunks: list[OutputChunk],
    items: list[bytes | Item],
    ended: tuple[int, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    answered, warning = Answered(sequences=sequences), ("Warning", "299 - ignored")
    answered.expect(warning)
    for each in chunks:
        answered.answer.deliver(each)
    answered.answer.fail(InvalidRequestError("late"))
    wanted = [item if isinstance(item, Item) else Item(item) for item in items]
    if wanted[0].code is None:
        wanted[0] = wanted[0]._replace(properties=(WORDS, warning))
    assert answered.items == wanted
    assert (answered.told, answered.answer.complete, caplog.records) == ([ended], True, [])


def test_a_chunk_without_bytes_is_no_item_unless_it_is_the_last() -> None:
    answered = Answered(Silent())
    answered.answer.deliver(chunk("a"))
    assert (answered.items, answered.answer.complete) == ([], False)
    answered.answer.deliver(chunk(ends=True))
    assert answered.items == [Item(b"", True, properties=(WORDS,))]


def test_a_request_that_could_not_be_read_is_refused() -> None:
    items: list[Item] = []
    served = ServedRequest("r-1", "DJL", "/invocations")
    telemetry = Told()
    ItemWriter(items.append, Options(), served, telemetry).fail(InvalidRequestError("no such field"))
    assert telemetry.told == [(424, "InvalidRequestError")]
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
