"""What a TensorRT-LLM has under one name of the table: shared by the two ways of looking at it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from djl_trtllm.backends.tensorrt_llm.names import REQUIRED, MemberKind, Owner


class _Unread(Enum):
    UNREAD = "unread"

    def __repr__(self) -> str:
        return self.name


UNREAD: Final = _Unread.UNREAD
"""A default that exists and is unknown without running code."""


@dataclass(frozen=True)
class Seen:
    """One name. `default` is plain data as in the table, REQUIRED or UNREAD; `type` the text of its annotation."""

    kind: MemberKind
    type: str | None = None
    default: object = REQUIRED


@dataclass(frozen=True)
class Sight:
    """What an owner has.

    `bases` are the names of the classes it derives from, outside the package too. `whole` is False where a class of
    the package that it derives from was not found: a name that is missing here may be there then.
    """

    names: Mapping[str, Seen]
    bases: frozenset[str]
    whole: bool = True


def assigned_attributes(constructor: ast.AST) -> Iterator[str]:
    """Names that code assigns to `self`: the class itself does not show them."""
    for node in ast.walk(constructor):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


class Absent(Exception):
    """The package does not have the owner where the table says."""


class Unseen(Exception):
    """The place where the table says the owner is could not be looked at."""


class Package(Protocol):
    """A TensorRT-LLM. `version` is None where it does not say."""

    @property
    def version(self) -> str | None: ...

    @property
    def description(self) -> str: ...

    def look(self, owner: Owner, module: str) -> Sight:
        """What `owner` has when it is imported from `module`; raises Absent or Unseen."""
        ...


_SAME = {
    "List": "list",
    "Dict": "dict",
    "Tuple": "tuple",
    "PositiveInt": "int",
    "NonNegativeInt": "int",
    "StrictInt": "int",
    "PositiveFloat": "float",
    "NonNegativeFloat": "float",
    "NoneType": "None",
}


def same_type(first: str, second: str) -> bool:
    """Whether two annotations say the same: `Optional[int]`, `int | None` and `typing.Union[int, None]` do.

    Modules before names do not count, nor do constraints (`PositiveInt` is `int`).
    """
    try:
        return _normal(first) == _normal(second)
    except SyntaxError:
        return first == second


def _normal(text: str) -> str:
    return _shape(ast.parse(text.strip(), mode="eval").body)


def _shape(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _normal(node.value)
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return _SAME.get(name, name)
    if isinstance(node, ast.BinOp):
        return _union([node.left, node.right])
    if isinstance(node, ast.Subscript):
        return _subscript(_shape(node.value), node.slice)
    return ast.unparse(node)


def _subscript(name: str, inside: ast.expr) -> str:
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Annotated":
        return _shape(parts[0])
    if name == "Optional":
        return _union([*parts, ast.Constant(None)])
    if name == "Union":
        return _union(parts)
    if name == "Literal":
        return f"Literal[{', '.join(sorted(ast.unparse(part) for part in parts))}]"
    return f"{name}[{', '.join(_shape(part) for part in parts)}]"


def _union(parts: list[ast.expr]) -> str:
    found: set[str] = set()
    for part in parts:
        shape = _shape(part)
        found |= set(shape.removeprefix("Union(").removesuffix(")").split(" | ")) if "Union(" in shape else {shape}
    return f"Union({' | '.join(sorted(found))})"
