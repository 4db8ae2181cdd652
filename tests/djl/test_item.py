from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.djl.item import QUIET, Item, content, count, take, text
from tests.support.djl import Reader

END = Item(last=True)


def test_a_part_of_an_answer_is_two_pairs() -> None:
    encoded = Item("der böse Wolf".encode()).encode()
    assert encoded == (
        b"\x00\x02\x00\x00\x00\x04data\x00\x00\x00\x0eder b\xc3\xb6se Wolf\x00\x00\x00\x04last\x00\x00\x00\x05false"
    )
    assert Reader(Item(b"a wolf", True).encode()).pairs() == {"data": "a wolf", "last": "true"}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.booleans())
def test_any_text_travels(text: str, last: bool) -> None:
    assert Reader(Item(text.encode(), last).encode()).pairs() == {"data": text, "last": str(last).lower()}


def test_an_error_is_four_pairs_without_data() -> None:
    encoded = Item(b"not sent", False, 503, "völlig voll").encode()
    assert Reader(encoded).pairs() == {"code": "503", "error": "völlig voll", "data": "", "last": "true"}
    assert list(Reader(encoded).pairs()) == ["code", "error", "data", "last"]


def test_nothing_new_is_an_item_without_data() -> None:
    assert Reader(QUIET).pairs() == {"data": "", "last": "false"}


def test_numbers_and_texts_are_big_endian() -> None:
    assert count(200) == b"\x00\xc8"
    assert text("é") == b"\x00\x00\x00\x02\xc3\xa9"
    assert content(b"abc") == b"\xff\xff\xff\xff\x00\x00\x00\x03abc"


def test_items_of_a_request_travel_as_one() -> None:
    items = deque([Item(b"a", properties=(("A", "1"),)), Item(b" wolf"), Item(b".", properties=(("B", "2"),))])
    assert take(items) == Item(b"a wolf.", False, None, "", (("A", "1"), ("B", "2")))
    assert not items


def test_the_end_of_a_response_goes_alone() -> None:
    items = deque([Item(b"a"), Item(b"."), END])
    assert [take(items), take(items)] == [Item(b"a."), END]


def test_an_error_goes_alone() -> None:
    error = Item(b"", True, 500, "broken")
    items = deque([Item(b"a"), Item(b"b"), error])
    assert [take(items), take(items)] == [Item(b"ab"), error]
    items = deque([error, Item(b"a")])
    assert [take(items), take(items)] == [error, Item(b"a")]


def test_there_has_to_be_something_to_take() -> None:
    with pytest.raises(IndexError):
        take(deque())
