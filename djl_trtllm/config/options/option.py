"""The declaration of one option: what it is (`Option`), its type (`ValueType`), and from text to its value and back."""

import enum
import json
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from djl_trtllm.config.options.choices import Choice


class Scope(enum.Enum):
    """The owner of an option, which decides its order of precedence (see `resolve.precedence`).

    MODEL options travel with the model. SERVER options configure the process, and the operator's settings override a
    model's. OPERATOR options let a model do something to the machine, so no file of a model directory can set them.
    PERMISSION options let code of the model run: a model directory may set them unless the operator sets them.
    """

    MODEL = "model"
    SERVER = "server"
    OPERATOR = "operator"
    PERMISSION = "permission"


@dataclass(frozen=True)
class Option:
    """Documentation and limits of one option.

    `key` is what users write (`option.max_num_tokens`, or a bare server key) and `aliases` are further spellings.
    `at_least`, `above`, `at_most`, `below` and `power_of_two` bound a number. `value_aliases` maps other spellings to
    values.
    `effect` says what the value does whatever the backend; where that is "", the backends' option maps say it.
    `legacy` says what happens instead, of an option that is accepted and has no effect; `warn` whether setting it is a
    warning, and `under_djl` what it does inside DJL Serving, if that is anything.
    `vllm_argument` is the argument of vLLM that takes values which the option does not have.
    `default_note` explains a default that is not a plain value; `example` is shown where the default is empty.
    """

    key: str
    description: str
    aliases: tuple[str, ...] = ()
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    power_of_two: bool = False
    value_aliases: Mapping[str, str] = field(default_factory=dict)
    effect: str = ""
    legacy: str = ""
    under_djl: str = ""
    vllm_argument: str = ""
    warn: bool = False
    source: str = ""
    default_note: str = ""
    example: str = ""
    scope: Scope = Scope.MODEL

    @property
    def effect_everywhere(self) -> str:
        """Return what the option does on every backend, "" where each has its own effect."""
        if self.legacy:
            return f"no effect{' any more' if self.warn else ''}: {self.legacy}"
        return self.effect

    @property
    def range_text(self) -> str:
        """The numeric bounds as text, "" if there are none."""
        bounds = (
            ("at least", self.at_least),
            ("greater than", self.above),
            ("at most", self.at_most),
            ("less than", self.below),
        )
        texts = ["a power of two"] if self.power_of_two else []
        return " and ".join([*texts, *(f"{text} {bound:g}" for text, bound in bounds if bound is not None)])

    def allows(self, number: float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
            and (not self.power_of_two or int(number).bit_count() == 1)
        )


MOST_GPUS = 65_536
"""The most GPUs of an option: more than any cluster has."""

_COUNTED: Mapping[str, Mapping[str, Any]] = {
    "count": {"at_least": 1},
    "amount": {"above": 0},
    "devices": {"at_least": 1, "at_most": MOST_GPUS},
}
"""Bounds of numbers of things, of quantities such as seconds, and of numbers of GPUs or machines, by unit's name."""
_NOT_OF_AN_OPTION = ("default", "type", "values", "prefix", *_COUNTED)


def option_of(name: str, row: Mapping[str, Any]) -> Option:
    """The declaration in a row. Without a `key` users write the `prefix` (`option.`) and the field's name."""
    declared: dict[str, Any] = {"key": f"{row.get('prefix', 'option.')}{name}"}
    for kind, bounds in _COUNTED.items():
        if kind in row:
            declared |= {"unit": row[kind], **bounds}
    declared |= {field: value for field, value in row.items() if field not in _NOT_OF_AN_OPTION}
    declared["aliases"] = tuple(row.get("aliases", ()))
    declared["scope"] = Scope(row.get("scope", Scope.MODEL))
    return Option(**declared)


# `enable` and `disable` are how trtllm-build writes its flags.
_TRUE = frozenset({"true", "1", "yes", "on", "enable"})
_FALSE = frozenset({"false", "0", "no", "off", "disable"})
_NONE = frozenset({"none", "null"})
# Bounded lengths: Python refuses to convert numbers of thousands of digits, with an error of its own.
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][+-]?[0-9]{1,3})?")
_PLAIN_BELOW = 10**15
_NOT_IN_PATHS, _NOT_IN_TEXTS = re.compile("\0"), re.compile("[\0\ud800-\udfff]")
"""A path may have bytes that are not UTF-8, which Python reads as lone surrogates; no response can have them."""
_TRAILING_COMMENT = re.compile(r"\s+#.*$", re.DOTALL)


class NotAValueError(ValueError):
    """Text that is not a value of its type; the message has what was expected."""


@dataclass(frozen=True)
class ValueType:
    """The type of an option: `base`, or one of the `keywords`, or None if it is `optional`.

    With `many` it is a tuple of at least one `base`. `words` are all values of a text that is no enumeration.
    """

    base: type
    optional: bool = False
    keywords: tuple[str, ...] = ()
    many: bool = False
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, annotation: Any) -> "ValueType":
        """Read a field's annotation: a plain type, an enum or a tuple, or a union of one with None and keywords.

        Keywords are a `Literal` beside a type; a `Literal` alone has all values. A tuple is `tuple[TYPE, ...]`.
        """
        members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        items = [get_args(member)[0] for member in members if get_origin(member) is tuple]
        if items:
            return cls(items[0], types.NoneType in members, many=True)
        keywords = tuple(word for member in members if get_origin(member) is Literal for word in get_args(member))
        plain = (member for member in members if get_origin(member) is None and isinstance(member, type))
        base = next((member for member in plain if member is not types.NoneType), None)
        if base is None:
            return cls(str, types.NoneType in members, words=keywords)
        return cls(base, types.NoneType in members, keywords)

    @property
    def is_text(self) -> bool:
        """Return whether any text is a value, so that ` # ...` at its end may be part of it."""
        return self.base in (str, Path) and not self.many and not self.words

    @property
    def choices(self) -> tuple[str, ...]:
        return self.base.all_values() if issubclass(self.base, Choice) else self.words

    def describe(self, option: Option) -> str:
        """The expected values, for messages and documents."""
        if self.many:
            one = "names" if self.base is str else "whole numbers" if self.base is int else "numbers"
            unit = f" ({option.unit})" if option.unit else ""
            bounds = f", each {option.range_text}" if option.range_text else ""
            text = f"{one}{unit} with commas between them{bounds}"
        elif self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.base is bool:
            text = "true or false"
        elif self.base in (int, float):
            text = "a whole number" if self.base is int else "a number"
            text += f" ({option.unit})" if option.unit else ""
            text += f", {option.range_text}" if option.range_text else ""
        else:
            text = "a path" if self.base is Path else "text"
        return " or ".join([text, *self.keywords])

    def parse(self, text: str, option: Option) -> Any:
        """Convert text to a value. Raises `NotAValueError`."""
        text = text.strip()
        if (_NOT_IN_PATHS if self.base is Path else _NOT_IN_TEXTS).search(text):
            raise NotAValueError(f"expected {self.describe(option)}, in UTF-8 and without NUL characters")
        folded = text.lower()
        if folded in self.keywords:
            return folded
        if self.optional and not self.is_text and folded in _NONE:
            return None
        value = self._convert(text, folded, option)
        if value is None:
            raise NotAValueError(f"expected {self.describe(option)}{_hint(text)}")
        return value

    def check(self, value: Any, option: Option) -> Any:
        """Convert a value that a program passes: text is parsed, a whole number may be given for any number.

        Raises `NotAValueError`.
        """
        if isinstance(value, str) and (self.words or not isinstance(value, self.base)):
            return self.parse(value, option)
        if value is None and self.optional:
            return None
        if self.many:
            one = ValueType(self.base)
            if not isinstance(value, (tuple, list)) or not value:
                raise NotAValueError(f"expected {self.describe(option)}")
            return tuple(one.check(item, option) for item in value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.base is float and is_number:
            value = float(value)
        right_type = isinstance(value, self.base) and (self.base is bool or not isinstance(value, bool))
        if not right_type or (is_number and not option.allows(value)):
            raise NotAValueError(f"expected {self.describe(option)}")
        return value

    def _convert(self, text: str, folded: str, option: Option) -> Any:
        if self.many:
            return self._items(text, option)
        if self.base is str and not self.words:
            return text
        if self.base is Path:
            return Path(text)
        if self.base is bool:
            return True if folded in _TRUE else False if folded in _FALSE else None
        if self.base in (int, float):
            number = _number(text, whole=self.base is int)
            return number if number is not None and option.allows(number) else None
        name = option.value_aliases.get(folded, folded)
        return next((self.base(value) for value in self.choices if value.lower() == name.lower()), None)

    def _items(self, text: str, option: Option) -> tuple[Any, ...] | None:
        """The items of `a,b` or of a JSON list; None if one is not valid or there are none."""
        if text.startswith("["):
            try:
                loaded = json.loads(text)
            except (ValueError, RecursionError):
                return None
            if not isinstance(loaded, list) or any(isinstance(item, (bool, dict, list)) for item in loaded):
                return None
            parts = [str(item).strip() for item in loaded]
        else:
            parts = [part.strip() for part in text.removesuffix(",").split(",")]
        one = ValueType(self.base)
        items = tuple(one._convert(part, part.lower(), option) for part in parts)
        return items if items and all(item is not None and item != "" for item in items) else None


def _number(text: str, *, whole: bool) -> float | None:
    if whole:
        return int(text) if _INTEGER.fullmatch(text) else None
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def _hint(text: str) -> str:
    if is_quoted(text):
        return ", without quotes"
    if re.fullmatch(r"[0-9]+([_,][0-9]+)+", text):
        return ", in digits only"
    return ""


def is_quoted(text: str) -> bool:
    """Return whether `text` is in quotes; property files have no quotes, so they are part of the value."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"


def without_comment(text: str) -> str:
    """`text` without a trailing ` # ...`.

    The properties format has no trailing comments: Java keeps them in the value, and yet documents use them.
    """
    return _TRAILING_COMMENT.sub("", text)


def as_text(value: Any) -> str:
    """A value as it is written in `serving.properties`; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < _PLAIN_BELOW:
        return str(int(value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, (tuple, list)):
        return ",".join(as_text(item) for item in value)
    return str(value.value) if isinstance(value, enum.Enum) else str(value)
