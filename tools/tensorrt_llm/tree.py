"""A TensorRT-LLM that lies unpacked in a directory, read without running it (`ast`)."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from djl_trtllm.backends.tensorrt_llm.names import REQUIRED, Owner, owners
from tools.tensorrt_llm.seen import UNREAD, Absent, Seen, Sight, Unseen, assigned_attributes

_PACKAGE = "tensorrt_llm"
_FIELD_CALLS = frozenset({"Field", "PydanticField", "field"})
_PROPERTIES = frozenset({"property", "cached_property"})
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Tree:
    """The package `tensorrt_llm` in or at `root`: a checkout, or an unpacked wheel.

    Raises FileNotFoundError where there is none.
    """

    def __init__(self, root: Path) -> None:
        places = (root / _PACKAGE, root)
        self.package = next((place for place in places if place.name == _PACKAGE and place.is_dir()), None)
        if self.package is None:
            raise FileNotFoundError(f"{root} has no folder {_PACKAGE}")
        self._modules: dict[str, _Module | None] = {}

    @property
    def description(self) -> str:
        return f"files in {self.package}"

    @cached_property
    def version(self) -> str | None:
        module = self.module(f"{_PACKAGE}.version")
        value = module.values.get("__version__") if module else None
        return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None

    def look(self, owner: Owner, module: str) -> Sight:
        sight = self._sight(module, owner.symbol)
        if owner.declared is None:
            return sight
        declaring, _, name = owner.declared.partition(":")
        arguments = self._sight(declaring, name)
        own = {name: seen for name, seen in sight.names.items() if seen.kind in ("method", "attribute")}
        return Sight(own | dict(arguments.names), sight.bases, sight.whole and arguments.whole)

    def module(self, name: str) -> _Module | None:
        """A module of the package, None where there is no such file."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> _Module | None:
        assert self.package is not None
        place = self.package.joinpath(*name.split(".")[1:])
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.is_file():
                return _Module(self, name, path)
        return None

    def _sight(self, module_name: str, symbol: str) -> Sight:
        module = self.module(module_name)
        if module is None:
            raise Unseen(f"no file of the module {module_name}")
        first, *inner = symbol.split(".")
        found = module.find(first)
        for name in inner:
            method = _Class(found).method(name)
            if method is None:
                raise Absent(f"{module_name} has no {symbol}")
            found = method
        if isinstance(found.node, ast.ClassDef):
            return _Class(found).sight()
        return Sight(_parameters(found), frozenset())


@dataclass(frozen=True)
class _Found:
    """A class or function, and the module that defines it."""

    module: _Module
    node: _Definition


class _Module:
    """The top level of one file."""

    def __init__(self, tree: Tree, name: str, path: Path) -> None:
        self.tree = tree
        self.name = name
        self._parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.values: dict[str, ast.expr] = {}
        self._definitions: dict[str, _Definition] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self._stars: list[str] = []
        for statement in _top_level(ast.parse(path.read_text(encoding="utf-8"), str(path)).body):
            self._enter(statement)

    def _enter(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.ClassDef, *_Function)):
            self._definitions[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if alias.name == "*":
                    self._stars.append(self._origin(statement))
                else:
                    self.imports[alias.asname or alias.name] = (self._origin(statement), alias.name)
        elif isinstance(statement, ast.Assign):
            self.values |= {target.id: statement.value for target in statement.targets if isinstance(target, ast.Name)}

    def _origin(self, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parts = self._parent.split(".")
        parts = parts[: len(parts) - statement.level + 1]
        return ".".join([*parts, *(statement.module or "").split(".")]).rstrip(".")

    def find(self, name: str, passed: frozenset[tuple[str, str]] = frozenset()) -> _Found:
        """The definition behind a name, followed through imports; raises Absent or Unseen."""
        here = (self.name, name)
        if here in passed:
            raise Absent(f"{self.name} has no {name}: its imports go in a circle")
        if name in self._definitions:
            return _Found(self, self._definitions[name])
        alias = self.values.get(name)
        if isinstance(alias, ast.Name):
            return self.find(alias.id, passed | {here})
        if name in self.imports:
            origin, original = self.imports[name]
            return self._elsewhere(origin).find(original, passed | {here})
        unseen = None
        for origin in self._stars:
            try:
                return self._elsewhere(origin).find(name, passed | {here})
            except Absent:
                continue
            except Unseen as error:
                unseen = error
        raise unseen or Absent(f"{self.name} has no {name}")

    def _elsewhere(self, origin: str) -> _Module:
        module = self.tree.module(origin) if origin.split(".")[0] == _PACKAGE else None
        if module is None:
            raise Unseen(f"{self.name} has it from {origin}, of which there is no file")
        return module


class _Class:
    """One class with those it derives from."""

    def __init__(self, found: _Found) -> None:
        if not isinstance(found.node, ast.ClassDef):
            raise Unseen(f"{found.module.name} has {found.node.name} as a function")
        self.module, self.node = found.module, found.node

    def sight(self) -> Sight:
        names: dict[str, Seen] = {}
        bases: set[str] = set()
        whole = True
        for base in self.node.bases:
            bases.add(_last_name(base))
            try:
                inherited = _Class(self.module.find(_last_name(base))).sight()
            except Absent:
                continue
            except Unseen:
                whole = whole and not self._is_of_the_package(base)
                continue
            names |= inherited.names
            bases |= inherited.bases
            whole = whole and inherited.whole
        names |= dict(self._own(bases))
        return Sight(names, frozenset(bases), whole)

    def method(self, name: str) -> _Found | None:
        """A method, inherited ones included; raises Unseen where it may come from a class out of sight."""
        for statement in self.node.body:
            if isinstance(statement, _Function) and statement.name == name:
                return _Found(self.module, statement)
        unseen = None
        for base in self.node.bases:
            try:
                found = _Class(self.module.find(_last_name(base))).method(name)
            except Absent:
                continue
            except Unseen as error:
                unseen = error if self._is_of_the_package(base) else unseen
                continue
            if found is not None:
                return found
        if unseen is not None:
            raise unseen
        return None

    def _is_of_the_package(self, base: ast.expr) -> bool:
        origin, _ = self.module.imports.get(_last_name(base), ("", ""))
        return origin.split(".")[0] == _PACKAGE

    def _own(self, bases: set[str]) -> Iterator[tuple[str, Seen]]:
        is_enum = any(base.endswith(("Enum", "IntFlag")) for base in bases)
        declares = False
        for statement in self.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                declares = True
                yield from self._field(statement.target.id, statement)
            elif isinstance(statement, ast.Assign) and is_enum:
                yield from self._enum_members(statement)
            elif isinstance(statement, _Function):
                is_property = any(_last_name(decorator) in _PROPERTIES for decorator in statement.decorator_list)
                yield statement.name, Seen("attribute" if is_property else "method", None, UNREAD)
        for statement in self.node.body:
            if isinstance(statement, _Function) and statement.name == "__init__":
                yield from ((name, Seen("attribute", None, UNREAD)) for name in assigned_attributes(statement))
                if not declares:
                    yield from _parameters(_Found(self.module, statement)).items()

    def _field(self, name: str, statement: ast.AnnAssign) -> Iterator[tuple[str, Seen]]:
        # A metaclass that makes attributes of fields: PluginConfig before it was a pydantic model.
        hidden = name.startswith("_")
        if hidden and not any(keyword.arg == "metaclass" for keyword in self.node.keywords):
            return
        if _last_name(statement.annotation) == "ClassVar":
            return
        kept = not hidden and _keyword(statement.value, "init") is not False
        default = REQUIRED if statement.value is None else _default(self.module, statement.value)
        yield name.lstrip("_"), Seen("argument" if kept else "attribute", _text(statement.annotation), default)

    def _enum_members(self, statement: ast.Assign) -> Iterator[tuple[str, Seen]]:
        for target in statement.targets:
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield target.id, Seen("enum", None, self._enum_value(target.id, statement.value))

    def _enum_value(self, name: str, value: ast.expr) -> object:
        if isinstance(value, ast.Call) and _last_name(value.func) == "auto":
            # The package strenum gives a member its own name; Python's StrEnum the name in lower case.
            origins = {self.module.imports.get(_last_name(base), ("", ""))[0] for base in self.node.bases}
            return name if "strenum" in origins else UNREAD
        return _default(self.module, value)


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _top_level([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            yield from _top_level([*handlers, *statement.body, *statement.orelse])
        else:
            yield statement


def _parameters(found: _Found) -> dict[str, Seen]:
    assert isinstance(found.node, _Function)
    arguments = found.node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    pairs = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {
        argument.arg: Seen(
            "argument",
            _text(argument.annotation),
            REQUIRED if default is None else _default(found.module, default),
        )
        for argument, default in pairs
        if argument.arg not in ("self", "cls")
    }


def _default(module: _Module, value: ast.expr) -> object:
    if isinstance(value, ast.Call):
        return _called(module, value)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        return _enum_default(module, value.value.id, value.attr)
    return _constant(value)


def _called(module: _Module, call: ast.Call) -> object:
    name = _last_name(call.func)
    if name not in _FIELD_CALLS:
        return {"class": name} if name in owners() and not call.args and not call.keywords else UNREAD
    inside = {keyword.arg: keyword.value for keyword in call.keywords}
    if "default_factory" in inside:
        return _made(inside["default_factory"])
    default = call.args[0] if call.args else inside.get("default")
    if default is None or (isinstance(default, ast.Constant) and default.value is ...):
        return REQUIRED
    return _default(module, default)


def _made(factory: ast.expr) -> object:
    name = _last_name(factory)
    if name in ("list", "dict"):
        return [] if name == "list" else {}
    return {"class": name} if name in owners() else UNREAD


def _enum_default(module: _Module, enum: str, name: str) -> object:
    if enum in owners():
        return {"enum": enum, "name": name}
    try:
        return _Class(module.find(enum)).sight().names[name].default
    except (Absent, Unseen, KeyError):
        return UNREAD


def _constant(value: ast.expr) -> object:
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Mult, ast.Pow)):
        left, right = _constant(value.left), _constant(value.right)
        if isinstance(left, int) and isinstance(right, int):
            return left * right if isinstance(value.op, ast.Mult) else left**right
        return UNREAD
    try:
        return ast.literal_eval(value)
    except ValueError:
        return UNREAD


def _keyword(value: ast.expr | None, name: str) -> object:
    if isinstance(value, ast.Call):
        return next((_constant(keyword.value) for keyword in value.keywords if keyword.arg == name), None)
    return None


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _text(annotation: ast.expr | None) -> str | None:
    return None if annotation is None else ast.unparse(annotation)
