from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.batching.stopping import StopMatch, StopMatcher

short_text = st.text(alphabet="ab\n", max_size=20)


def feed(stops: list[str], pieces: list[str]) -> tuple[str, StopMatch | None]:
    """The text that was ever safe to show, and the match."""
    matcher = StopMatcher(stops)
    whole = ""
    for piece in pieces:
        whole += piece
        match = matcher.feed(piece)
        if match is not None:
            return whole[: matcher.safe], match
    return whole[: matcher.safe], None


def test_a_stop_split_over_pieces_is_found() -> None:
    assert feed(["END"], ["text E", "N", "D more"]) == ("text ", StopMatch("END", 5))


def test_text_that_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the EN") is None
    assert matcher.safe == 4
    assert matcher.feed("glish") is None
    assert matcher.safe == 11


def test_the_stop_that_begins_first_wins() -> None:
    assert feed(["late", "first"], ["x first late"]) == ("x ", StopMatch("first", 2))


def test_of_two_stops_at_one_place_the_longest_wins() -> None:
    assert feed(["ab", "abc"], ["xabc"]) == ("x", StopMatch("abc", 1))


def test_nothing_is_safe_before_there_is_text() -> None:
    assert StopMatcher(["END"]).safe == 0


def test_what_may_become_any_of_the_stops_is_held_back() -> None:
    matcher = StopMatcher(["END", "###"])
    assert matcher.feed("the EN") is None
    assert matcher.safe == 4


def test_the_longest_stop_decides_how_much_is_held_back() -> None:
    matcher = StopMatcher(["zz", "abcdef"])
    assert matcher.feed("xabcde") is None
    assert matcher.safe == 1


@given(
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(short_text, max_size=8)
)
def test_any_split_gives_what_a_search_of_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    shown, match = feed(stops, pieces)
    found = [whole.find(stop) for stop in stops if stop in whole]
    if not found:
        assert match is None
        assert whole.startswith(shown)
        held = whole[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    else:
        # Fed in pieces, a stop that completes early can beat a longer one that begins before it and completes later.
        assert match is not None
        assert whole[match.start :].startswith(match.stop)
        assert shown == whole[: match.start]
        assert not any(stop in shown for stop in stops)
