"""The strings that an argument of TensorRT-LLM takes, read from its type in the table of names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache


@cache
def choices(annotation: str) -> tuple[str, ...] | None:
    """The strings of `Optional[Literal['auto', 'float16']]`; None for a type that takes others too."""
    found = tuple(_choices(ast.parse(annotation, mode="eval").body))
    return None if None in found else tuple(text for text in found if text is not None)


def _choices(node: ast.expr) -> Iterator[str | None]:
    """Strings, and None for what is not a choice of strings."""
    if not isinstance(node, ast.Subscript) or ast.unparse(node.value) not in ("Optional", "Union", "Literal"):
        yield None
        return
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for part in parts:
        if isinstance(part, ast.Constant):
            yield from [part.value] if isinstance(part.value, str) else []
        else:
            yield from _choices(part)
