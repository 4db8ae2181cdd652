from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.config.fuzz import KEYS, MODEL_TYPES, VARIABLES, WORDS, generated, resolved

_values = st.sampled_from(WORDS) | st.text(max_size=12) | st.integers(-10, 10**9).map(str) | st.floats().map(str)
_names = st.sampled_from(KEYS) | st.text(max_size=12)
_files = st.lists(st.tuples(_names, _values), max_size=6).map(lambda pairs: "\n".join("=".join(p) for p in pairs))
_variables = st.dictionaries(st.sampled_from(VARIABLES) | st.text(min_size=1, max_size=12), _values, max_size=6)


@given(text=_files, environ=_variables, arguments=st.lists(st.text(max_size=20), max_size=2), kind=st.data())
def test_any_file_and_environment_resolve_or_are_refused(
    text: str, environ: dict[str, str], arguments: list[str], kind: st.DataObject
) -> None:
    resolved(text, environ, arguments, kind.draw(st.sampled_from(MODEL_TYPES) | st.text(max_size=8)))


def test_the_generator_of_the_fuzzer_makes_cases_of_both_kinds() -> None:
    choose = random.Random(1)
    outcomes = {resolved(*generated(choose), "llama") is None for _ in range(300)}
    assert outcomes == {True, False}
