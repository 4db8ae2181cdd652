"""What can be wrong in a line: the mutants of a module's source. Part of mutate.py."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeGuard

import yaml

EQUIVALENTS = Path(__file__).with_name("equivalent_mutants.yaml")

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.BitOr: "&",
    ast.BitAnd: "|",
}
_WIDER = {"BaseException": "Exception"}
_OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_FOR_READERS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "print", "cast", "TypeVar"})
"""Calls whose arguments are texts for people, or for the type checker."""


@dataclass(frozen=True)
class Mutant:
    """One change of a module: the bytes from `start` to `end` become `new`.

    `name` describes the change, and stays the same when lines move. An import runs what is `in_no_function`: also the
    fields of a class and the defaults of parameters.
    """

    name: str
    line: int
    start: int
    end: int
    new: str
    in_no_function: bool = False

    def applied(self, source: str) -> str | None:
        """Return the module's source with the change, or None if that is no Python."""
        text = source.encode()
        changed = (text[: self.start] + self.new.encode() + text[self.end :]).decode()
        try:
            ast.parse(changed)
        except SyntaxError:
            return None
        return changed


@dataclass(frozen=True)
class _Change:
    scope: str
    start: int
    end: int
    line: int
    new: str
    in_no_function: bool


@dataclass
class _Function:
    """The names of a function: parameters with the text of their types, and how often each local is assigned."""

    types: dict[str, str] = field(default_factory=dict)
    assigned: Counter[str] = field(default_factory=Counter)
    kept: set[str] = field(default_factory=set)
    """Parameters of `__init__` that `self` has under their names: exchanging `x` and `self.x` there changes nothing."""

    @classmethod
    def of(cls, node: ast.FunctionDef | ast.AsyncFunctionDef) -> _Function:
        """Return the names of a function, without those of functions inside it."""
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        found = cls({each.arg: ast.unparse(each.annotation) if each.annotation else "" for each in arguments})
        inside: list[ast.AST] = list(node.body)
        while inside:
            each = inside.pop()
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                found.assigned[each.id] += 1
            if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                inside.extend(ast.iter_child_nodes(each))
        if node.name == "__init__":
            statements = {ast.unparse(each) for each in node.body}
            found.kept = {name for name in found.types.keys() - found.assigned if f"self.{name} = {name}" in statements}
        return found

    def differs_from_own(self, name: str) -> bool:
        """Return whether a name of this function may be another object than the attribute of `self` with the name."""
        return name in self and name not in self.kept

    def others_of_the_type(self, name: str) -> list[str]:
        """Return the parameters with the same type as the named one."""
        kind = self.types.get(name)
        return [other for other, its in self.types.items() if kind and other != name and its == kind]

    def __contains__(self, name: str) -> bool:
        return name in self.types or name in self.assigned


class _Finder(ast.NodeVisitor):
    """Collects the changes of a module; offsets are in bytes, as ast counts."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.changes: list[_Change] = []
        self._scope: list[str] = []
        self._functions: list[_Function] = []
        self._attributes: list[set[str]] = []
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    # -- places ----------------------------------------------------------------------------------------------------

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _replace(self, node: ast.expr | ast.stmt | ast.keyword, new: str) -> None:
        start, end = self._span(node)
        self._cut(start, end, node.lineno, new)

    def _cut(self, start: int, end: int, line: int, new: str) -> None:
        scope = ".".join(self._scope) or "module"
        self.changes.append(_Change(scope, start, end, line, new, not self._functions))

    def _between(self, left: ast.expr, right: ast.expr, new: str) -> None:
        """Change an operator: what stands between two expressions, parentheses kept."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self.source[start:end].decode()
        old = gap.strip().lstrip(")").rstrip("(").strip()
        if old and gap.count(old) == 1:
            self._cut(start, end, right.lineno, gap.replace(old, new))

    # -- what is left out ------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self._attributes.append({each.attr for each in ast.walk(node) if _is_own_attribute(each)})
        for statement in node.body:
            self.visit(statement)
        self._attributes.pop()
        self._scope.pop()

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """The body and the defaults; neither annotations nor decorators. A Protocol's methods have no body."""
        self._scope.append(node.name)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self._functions.append(_Function.of(node))
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            if isinstance(node.target, ast.Attribute) and not isinstance(node.value, ast.Constant):
                self._replace(node.value, "None")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Asserts are there for the type checker."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """The values of a Literal are a type."""
        if not (isinstance(node.value, ast.Name) and node.value.id == "Literal"):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    # -- conditions ------------------------------------------------------------------------------------------------

    def _negate(self, test: ast.expr) -> None:
        # A comparison of two and a `not` are turned round below.
        simple = (isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) not in _ORDERS) or (
            isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        )
        if not simple:
            self._replace(test, f"not ({self._text(test)})")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._replace(test, "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._between(left, right, _COMPARISONS[type(operator)])
            if isinstance(operator, _ORDERS) and isinstance(right, ast.Name | ast.Attribute):
                self._replace(right, "1")
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = "or" if isinstance(node.op, ast.And) else "and"
        if len(node.values) == 2:
            self._between(node.values[0], node.values[1], new)
        else:
            neutral = "True" if isinstance(node.op, ast.And) else "False"
            for value in node.values:
                self._replace(value, neutral)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, f"({self._text(node.operand)})")
        elif isinstance(node.op, ast.USub):
            self._replace(node, self._text(node.operand))
            return
        self.generic_visit(node)

    # -- values ----------------------------------------------------------------------------------------------------

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right))
        if not text and type(node.op) in _OPERATORS:
            self._between(node.left, node.right, _OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int):
            self._replace(node, str(value + 1))
        elif isinstance(value, float):
            self._replace(node, repr(value * 2 + 1))
        elif isinstance(value, str) and value and " " not in value:  # a text with blanks is for people
            self._replace(node, repr(value + "X"))
        elif isinstance(value, bytes) and value:
            self._replace(node, repr(value + b"X"))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts with values in them are mostly for people; what they show is code."""

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        if node.id in _OTHER_NAMES:
            self._replace(node, _OTHER_NAMES[node.id])
        for other in self._functions[-1].others_of_the_type(node.id) if self._functions else ():
            self._replace(node, other)
        differs = self._functions and self._functions[-1].differs_from_own(node.id)
        if differs and self._attributes and node.id in self._attributes[-1]:
            self._replace(node, f"self.{node.id}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        local = self._functions and self._functions[-1].differs_from_own(node.attr)
        if local and isinstance(node.ctx, ast.Load) and _is_own_attribute(node):
            self._replace(node, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _FOR_READERS or name.endswith(("Error", "Warning")):
            return
        keywords = [] if name == "zip" else node.keywords  # its `strict` is an assert
        if name == "range" and not isinstance(node.args[-1], ast.Constant):
            self._replace(node.args[-1], "1")
        for keyword in keywords:
            start, end = self._span(keyword)
            comma = self.source[end:].lstrip()[:1] == b","
            after = end + self.source[end:].index(b",") + 1 if comma else end
            if keyword.arg is not None and (comma or self.source[:start].rstrip()[-1:] in b"(,"):
                self._cut(start, after, keyword.value.lineno, "")
        for part in (node.func, *node.args, *keywords):
            self.visit(part)

    # -- statements ------------------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call):
            name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
            if name in _FOR_READERS:
                return
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if names & {"__slots__", "__all__", "logger"}:
            return
        # Without the only assignment of a plain variable the name would be missing, which any test notices.
        again = self._functions and all(
            name in self._functions[-1].types or self._functions[-1].assigned[name] > 1 for name in names
        )
        kept = (ast.Attribute, ast.Subscript, *([ast.Name] if again else []))
        if self._scope and all(isinstance(target, kept) for target in node.targets):
            self._replace(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        # A constant has mutants of its own.
        if not isinstance(node.value, ast.Constant):
            self._replace(node, "return None")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "pass")

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if isinstance(node.type, ast.Name) and node.type.id in _WIDER:
            self._replace(node.type, _WIDER[node.type.id])
        for statement in node.body:
            self.visit(statement)


_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _is_own_attribute(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def mutants_of(text: str) -> Iterator[Mutant]:
    """Yield the mutants of a source, in the order of their lines."""
    source = text.encode()
    finder = _Finder(source)
    finder.visit(ast.parse(text))
    seen: Counter[str] = Counter()
    for change in sorted(set(finder.changes), key=lambda change: (change.start, change.end, change.new)):
        begin = source.rfind(b"\n", 0, change.start) + 1
        before, after = source[begin:], source[begin : change.start] + change.new.encode() + source[change.end :][:200]
        lines = [version.split(b"\n", 1)[0].decode(errors="replace").strip() for version in (before, after)]
        name = f"{change.scope}: {lines[0]} -> {lines[1]}"
        seen[name] += 1
        numbered = name if seen[name] == 1 else f"{name} #{seen[name]}"
        yield Mutant(numbered, change.line, change.start, change.end, change.new, change.in_no_function)


def equivalents(module: str) -> dict[str, str]:
    """The names of a module's mutants that change nothing, with the reasons."""
    return _all_equivalents().get(module, {})


@cache
def _all_equivalents() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = yaml.safe_load(EQUIVALENTS.read_text())
    return table
