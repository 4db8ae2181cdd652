"""The TensorRT-LLM that is installed, looked at by importing it (`inspect`)."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

from typing_extensions import is_typeddict

from djl_trtllm.backends.tensorrt_llm.names import REQUIRED, Owner, owners
from tools.tensorrt_llm.seen import UNREAD, Absent, Seen, Sight, Unseen, assigned_attributes


class Installed:
    """The package `tensorrt_llm` of this Python; making it imports it, with what that raises."""

    def __init__(self) -> None:
        self._package = import_module("tensorrt_llm")

    @property
    def description(self) -> str:
        return f"imported from {self._package.__file__}"

    @property
    def version(self) -> str | None:
        return getattr(self._package, "__version__", None)

    def look(self, owner: Owner, module: str) -> Sight:
        found = _resolve(module, owner.symbol)
        if not inspect.isclass(found):
            return Sight(_parameters(found), frozenset())
        names = dict(_names(found))
        if owner.declared is not None:
            declaring, _, name = owner.declared.partition(":")
            own = {name: seen for name, seen in names.items() if seen.kind in ("method", "attribute")}
            names = own | _arguments(_resolve(declaring, name))
        return Sight(names, frozenset(base.__name__ for base in found.__mro__))


def _resolve(module: str, symbol: str) -> Any:
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module + ".").startswith(error.name + "."):
            raise Absent(f"there is no module {module}") from error
        raise Unseen(f"importing {module} failed: {error}") from error
    except Exception as error:
        raise Unseen(f"importing {module} failed: {error}") from error
    for name in symbol.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise Absent(f"{module} has no {symbol}") from error
    return found


def _names(cls: type) -> Iterator[tuple[str, Seen]]:
    yield from ((name, Seen("attribute", None, UNREAD)) for name in _assigned_attributes(cls))
    for name in dir(cls):
        static = inspect.getattr_static(cls, name)
        if isinstance(static, (property, cached_property)):
            yield name, Seen("attribute", None, UNREAD)
        elif callable(static) or isinstance(static, (classmethod, staticmethod)):
            yield name, Seen("method")
    yield from _arguments(cls).items()


def _arguments(cls: type) -> dict[str, Seen]:
    """What a class takes, and the members of an enum."""
    members: Mapping[str, Any] | None = getattr(cls, "__members__", None)
    if members is not None:
        return {name: Seen("enum", None, _member_value(member)) for name, member in members.items()}
    fields: Mapping[str, Any] | None = getattr(cls, "model_fields", None)
    if fields is not None:
        return {name: _model_field(field) for name, field in fields.items()}
    if dataclasses.is_dataclass(cls):
        return {field.name.lstrip("_"): _dataclass_field(field) for field in dataclasses.fields(cls)}
    if is_typeddict(cls):
        return {name: Seen("argument", inspect.formatannotation(kind)) for name, kind in cls.__annotations__.items()}
    return _parameters(vars(cls)["__init__"]) if "__init__" in vars(cls) else {}


def _member_value(member: Any) -> object:
    return _plain(member.value) if isinstance(member, enum.Enum) else UNREAD


def _model_field(field: Any) -> Seen:
    kind = inspect.formatannotation(field.annotation)
    if field.is_required():
        return Seen("argument", kind)
    return Seen("argument", kind, _made(field.default_factory) if field.default_factory else _plain(field.default))


def _dataclass_field(field: dataclasses.Field[Any]) -> Seen:
    text = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    default: object = REQUIRED
    if field.default is not dataclasses.MISSING:
        default = _plain(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        default = _made(field.default_factory)
    return Seen("argument" if field.init else "attribute", text, default)


def _parameters(function: Callable[..., Any]) -> dict[str, Seen]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: Seen(
            "argument",
            None if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation),
            REQUIRED if parameter.default is parameter.empty else _plain(parameter.default),
        )
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind not in variadic
    }


def _made(factory: Callable[..., Any]) -> object:
    if factory in (list, dict):
        return factory()
    return {"class": factory.__name__} if inspect.isclass(factory) and factory.__name__ in owners() else UNREAD


def _plain(value: Any) -> object:
    if isinstance(value, enum.Enum):
        name = type(value).__name__
        return {"enum": name, "name": value.name} if name in owners() else _plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str, list, dict)):
        return value
    name = type(value).__name__
    return {"class": name} if name in owners() else UNREAD


def _assigned_attributes(cls: type) -> Iterator[str]:
    """Attributes that the constructors of a class assign, those of its bases included."""
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(vars(base)["__init__"]))
        except (OSError, TypeError):
            continue
        yield from assigned_attributes(ast.parse(source))
