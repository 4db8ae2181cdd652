"""What reading a request costs is bounded: calls and characters are counted."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

import pytest

from djl_trtllm.api.parameters import LONGEST_STRING, STRINGS, STRINGS_OR_NONE, Kind, Parameter, Problems, Table, show

TABLE = Table((Parameter(("top_k", "top_p"), STRINGS, "top"),))


@pytest.mark.parametrize("kind", [STRINGS, STRINGS_OR_NONE])
def test_a_word_has_a_bounded_length(kind: Kind) -> None:
    assert kind.read(["a" * LONGEST_STRING]) == ("a" * LONGEST_STRING,)
    with pytest.raises(ValueError, match=f"one has {LONGEST_STRING + 1} characters, at most {LONGEST_STRING}"):
        kind.read(["b", "a" * (LONGEST_STRING + 1)])


def test_of_many_unknown_names_only_those_that_are_shown_get_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look(name: str, names: Mapping[str, Parameter], n: int) -> list[str]:
        looked.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", look)
    problems = Problems()
    TABLE.read({f"top{number}": 1 for number in range(1000)}, problems, "field")
    assert (len(problems.invalid), len(looked)) == (1000, 10)
    problems = Problems()
    TABLE.read({f"top{number}": 1 for number in range(20_000)}, problems, "field")
    assert problems.invalid == ["there are 20000 names of the kind field: expected at most 1024"]
    assert len(looked) == 10


def test_of_a_large_value_only_what_is_shown_is_written() -> None:
    class Counted(list[int]):
        seen = 0

        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                self.seen += 1
                yield item

    large = Counted(range(100_000))
    assert show({"a": large}) == f'{{"a":{[*range(40)]}'.replace(" ", "")[:80] + "…"
    assert large.seen < 80
    assert show([[[]] * 3, {"a": None}, "é", 1.5]) == '[[[],[],[]],{"a":null},"é",1.5]'
