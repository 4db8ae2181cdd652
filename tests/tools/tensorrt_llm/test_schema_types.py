from __future__ import annotations

import pytest

from tools.tensorrt_llm.schema_types import kinds_of


@pytest.mark.parametrize(
    ("annotation", "kinds"),
    [
        ("Optional[int]", ["integer", "null"]),
        ("int | None", ["integer", "null"]),
        ("Union[str, Path]", ["string"]),
        ("Literal['b', 'a']", ["'a'", "'b'"]),
        ("Literal['a', None]", ["'a'", "null"]),
        ("Optional[Union[str, List[str]]]", ["array", "null", "string"]),
        ("Dict[str, str]", ["object"]),
        ("a.b.LoraConfig", ["LoraConfig"]),
        ("Optional[torch.Tensor]", ["Tensor", "null"]),
        ("float", ["number"]),
        ("bool", ["boolean"]),
    ],
)
def test_annotations_in_all_spellings_are_the_same_kinds(annotation: str, kinds: list[str]) -> None:
    assert kinds_of(annotation) == kinds
