"""Lines for terminals and pipes."""

from __future__ import annotations

from djl_trtllm.listing import Listing, columns, wrapped


def test_without_a_width_text_stays_as_it_is() -> None:
    assert wrapped("a  b\n" + "x " * 100, None) == "a  b\n" + "x " * 100


def test_lines_are_wrapped_between_words_and_words_stay_whole() -> None:
    assert wrapped("one two three four", 9, indent="  ") == "one two\n  three\n  four"
    assert wrapped("a/very-long/path-that-stays whole", 8) == "a/very-long/path-that-stays\nwhole"


def test_lines_of_the_text_stay_lines_and_bullets_hang() -> None:
    text = "expected:\n  - one of these\n\nend"
    assert wrapped(text, 12) == "expected:\n  - one of\n    these\n\nend"


def test_details_are_a_column_and_empty_ones_left_out() -> None:
    listing = Listing("title", 20)
    listing.space()
    listing.item("key = value", {"from": "here", "effect": "some words that go on", "other": ""})
    listing.item("next = 1", {}, dim=True)
    assert listing.text.plain.splitlines() == [
        "title",
        "",
        "key = value",
        "  from    here",
        "  effect  some words",
        "          that go on",
        "next = 1",
    ]


def test_cells_are_aligned_and_lines_have_no_space_at_their_end() -> None:
    rows = [("name", "GiB", ""), ("a", "10.5", "note"), ("long name", "1.5", "")]
    assert columns(rows, right=(1,), indent="  ") == [
        "  name        GiB",
        "  a          10.5  note",
        "  long name   1.5",
    ]
    assert columns([]) == []
