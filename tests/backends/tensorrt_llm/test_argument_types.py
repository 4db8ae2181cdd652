from __future__ import annotations

import pytest

from djl_trtllm.backends.tensorrt_llm.argument_types import choices


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("Literal['auto', 'slow']", ("auto", "slow")),
        ("Optional[Literal['fp8']]", ("fp8",)),
        ("Literal['fp8', None]", ("fp8",)),
        ("Union[Literal['a'], Literal['b']]", ("a", "b")),
        ("Union[Literal['a'], str]", None),
        ("Optional[str]", None),
        ("str", None),
        ("List[int]", None),
    ],
)
def test_only_a_choice_of_strings_has_choices(annotation: str, expected: tuple[str, ...] | None) -> None:
    assert choices(annotation) == expected
