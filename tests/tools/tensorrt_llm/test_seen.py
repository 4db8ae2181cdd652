from __future__ import annotations

import pytest

from tools.tensorrt_llm.seen import same_type


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Optional[List[int]]", "typing.Optional[typing.List[int]]", True),
        ("Optional[int]", "int | None", True),
        ("Union[str, int, None]", "Optional[Union[int, str]]", True),
        ("int", "Annotated[PositiveInt, Gt(0)]", True),
        ("Literal['a', 'b']", "Literal['b', 'a']", True),
        ("KvCacheConfig", "tensorrt_llm.llmapi.llm_args.KvCacheConfig", True),
        ("Optional[RequestOutput]", "Optional['RequestOutput']", True),
        ("Literal['a']", "Literal['a', 'b']", False),
        ("Optional[int]", "int", False),
        ("List[int]", "List[str]", False),
    ],
)
def test_types_are_the_same_when_they_say_the_same(first: str, second: str, same: bool) -> None:
    assert same_type(first, second) is same
    assert same_type(second, first) is same
