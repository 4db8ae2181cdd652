"""What clients may name models and adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.service.adapters import Adapters
from djl_trtllm.service.names import problem_of_name, problem_of_text

GOOD = ["a", "my-adapter_2.1", "ü 3", "a" * 4096]
BAD = ["", "a/b", "/", ".", "..", "a\nb", "a\0", "\x1b[31m", "a" * 4097]


@pytest.mark.parametrize("name", GOOD)
def test_a_name_is_taken(name: str) -> None:
    assert problem_of_name(name, "a model") is None


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_is_none_is_refused_in_a_line(name: str) -> None:
    problem = problem_of_name(name, "a model")
    assert problem is not None and "a model" in problem and problem.isprintable() and len(problem) < 200


def test_a_path_may_have_folders() -> None:
    assert problem_of_text("a/b", "src") is None
    assert problem_of_text("a\0b", "src") is not None


@pytest.mark.parametrize(
    ("name", "source"), [("a/b", "x"), ("a", "x\0y"), ("a", "x\ny"), ("a", "x" * 5000), ("a", "x" * 300)]
)
def test_an_adapter_of_such_a_name_or_path_is_refused(tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / "adapters").mkdir()
    with pytest.raises(InvalidRequestError):
        Adapters(tmp_path / "adapters").register(name, source)
