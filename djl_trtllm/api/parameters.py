"""Parameter tables: a row per request parameter, and the function that reads a request with them.

A row has the names of a parameter, its type and range, and where its value goes. Rows without a `target` are
parameters of the API that this server does not support: a value that changes nothing is accepted, any other is
refused by name. All problems of a request are reported together. The same tables describe requests: `Table.schema`.
"""

import difflib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import orjson

from djl_trtllm.api.base import RawRequest
from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import UnknownParameters
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.files import read_table

_logger = logging.getLogger(__name__)

IGNORED = ""
"""Target of parameters that are accepted and have no effect, on purpose."""

_SHOWN = 80
_MOST_PROBLEMS = 10
_MOST_NOTED = 32
"""The most unknown names of a request that are noted: each is compared with all known ones."""
_MISTYPED, _ALIKE = 0.8, 0.6
"""Similarities of two names from which on one is probably meant to be the other, or may be."""
_meant: set[str] = set()
"""The names of parameters in all tables that have an effect or are refused."""
_MOST_LOGGED = 1000
_logged: set[str] = set()
"""Names of parameters without effect that are in the log already."""
# Every token is checked against every stop string, so their number is limited.
_MOST_STRINGS = 64
_MOST_IDS = 1024
_MOST_WORDS = 1024
"""The most words of a list from Triton's or Truss's clients, empty ones included: `_MOST_STRINGS` bounds the others."""
LONGEST_STRING = 1024
"""Characters of a stop string or a bad word: each is tokenised, and looked for in every token's text."""
_MOST_MEMBERS = 1024
"""The most members of an object: a table reads none of a larger one."""


UNSUPPORTED = {name: advice for advice, names in read_table("unsupported.toml", __package__).items() for name in names}
"""Parameters that no table has and that would change the output, and what to do instead."""
_NOTHING: tuple[object, ...] = (False, "", [], {})
"""Values of unknown parameters that ask for nothing."""


class Kind(NamedTuple):
    """A type and its range. `read` returns the value to use, or raises ValueError with a hint (may be empty).

    `schema` is the JSON schema of the values: no value outside it is accepted. Empty: any value.
    """

    expected: str
    read: Callable[[Any], Any]
    schema: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row.

    `names`: the first is the documented one. `target`: the key of the value in the result of `read`, `IGNORED`, or
    None for a parameter that is refused unless its value is one of `neutral`. `advice` completes the refusal. The
    kind of an `IGNORED` row only describes it: other code reads it, or nothing does.
    A request may use several names of one row with equal values; with `union`, their lists are joined. `needs`: the
    fields of a request, or kinds of guides, of which an engine has to honour one; by default the target.
    """

    names: tuple[str, ...]
    kind: Kind | None = None
    target: str | None = None
    neutral: tuple[object, ...] = ()
    advice: str = ""
    union: bool = False
    needs: tuple[str, ...] = ()

    def accepts(self, raw: object) -> bool:
        """Whether the row accepts the value as one that changes nothing."""
        return any(raw is neutral or (raw == neutral and type(raw) is not bool) for neutral in self.neutral)


def ignored(*names: str) -> tuple[Parameter, ...]:
    """Rows of parameters that nothing reads."""
    return tuple([Parameter((name,), target=IGNORED) for name in names])


class Problems(msgspec.Struct):
    """The problems of a request. `option.unknown_parameters` says which `unknown` names are `ignored` instead.
    `left_out` are parts of the request that are known and not used by this server.

    `sent` has the names that the client used, by target, for problems that are found when all values are read.
    """

    invalid: list[str] = msgspec.field(default_factory=list)
    unsupported: list[str] = msgspec.field(default_factory=list)
    ignored: list[str] = msgspec.field(default_factory=list)
    left_out: list[str] = msgspec.field(default_factory=list)
    unknown: UnknownParameters = UnknownParameters.REFUSE
    sent: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether there are as many problems as an error shows: further ones are only counted."""
        return len(self.invalid) + len(self.unsupported) >= _MOST_PROBLEMS

    @classmethod
    def of(cls, options: Options) -> "Problems":
        """No problems yet, of a request for a model with these options."""
        return cls(unknown=options.unknown_parameters)

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The response headers that name what was ignored, and what was left out."""
        if not (self.ignored or self.left_out):
            return ()
        how = f"option.unknown_parameters={self.unknown.value}"
        texts = {
            f"unknown and ignored: {_listed(self.ignored)} ({how})": self.ignored,
            f"left out, because this server does not run them: {_listed(self.left_out)}": self.left_out,
        }
        return tuple(("Warning", f'299 djl-trtllm "{text}"') for text, names in texts.items() if names)

    def ignore(self, name: str, where: str) -> None:
        """Take note of an unknown name. The log has each name once, as long as there are not very many."""
        self.ignored.append(name)
        _log_once(logging.WARNING, "unknown", where, name, f"ignored (option.unknown_parameters={self.unknown.value})")

    def raise_any(self, prefix: str = "") -> None:
        """Raise one error with all problems, UnsupportedParameterError if no parameter is invalid."""
        lines = self.invalid + self.unsupported
        if not lines:
            return
        shown = lines[:_MOST_PROBLEMS]
        if len(lines) > len(shown):
            shown.append(f"and {len(lines) - len(shown)} more")
        error = InvalidRequestError if self.invalid else UnsupportedParameterError
        raise error(prefix + "; ".join(shown))


class Table:
    """Rows by name. `elsewhere` says where misplaced names belong; requests without a `required` one are refused."""

    def __init__(
        self,
        *groups: Iterable[Parameter],
        elsewhere: Mapping[str, str] | None = None,
        required: tuple[str, ...] = (),
    ) -> None:
        self.rows: dict[str, Parameter] = {name: row for group in groups for row in group for name in row.names}
        self._elsewhere = elsewhere or {}
        self._required = required
        _meant.update(name for name, row in self.rows.items() if row.target != IGNORED)

    def read(self, given: Mapping[str, Any], problems: Problems, where: str) -> dict[str, Any]:
        """Return the values by target. A JSON null means not given. `where` is the kind of name in errors."""
        values: dict[str, Any] = {}
        for name, raw in _bounded(given, problems, where):
            row = self.rows.get(name)
            if row is None:
                self._read_unknown(name, raw, problems, where)
            elif row.kind is None and row.target == IGNORED:
                _log_once(logging.INFO, "the", where, name, "it has no effect on a model that is served here")
            elif row.target is None:
                if not row.accepts(raw):
                    problems.unsupported.append(f"'{name}' is {show(raw)}, and {_not_accepted(row)}")
            elif row.target != IGNORED:
                assert row.kind is not None
                try:
                    value = row.kind.read(raw)
                except ValueError as error:
                    problems.invalid.append(f"'{name}' is {show(raw)}: expected {row.kind.expected}{error}")
                    continue
                if row.target not in values:
                    problems.sent[row.target] = name
                    values[row.target] = value
                elif row.union:
                    values[row.target] = tuple(dict.fromkeys((*values[row.target], *value)))
                elif values[row.target] != value:
                    problems.invalid.append(
                        f"'{name}' and '{problems.sent[row.target]}' mean the same and have different values: give one"
                    )
        return values

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the objects that `read` accepts. What becomes of other members is an option."""
        properties = {name: _described(name, row, name in self._required) for name, row in self.rows.items()}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        return schema | {"required": list(self._required)} if self._required else schema

    def refused(self, refusals: Mapping[str, str]) -> dict[str, str]:
        """The reasons why parameters are refused, "" for one that has an effect; see `ModelStatus.refusals`."""
        found = {}
        for name, row in self.rows.items():
            reasons = [refusals.get(each, "") for each in row.needs or (row.target or "",)]
            if row.target != IGNORED:
                found[name] = _not_accepted(row) if row.target is None else reasons[0] if all(reasons) else ""
        return found

    @property
    def kind(self) -> Kind:
        """The kind of a parameter whose value is such an object."""
        return Kind("an object", OBJECT.read, self.schema())

    def _read_unknown(self, name: str, raw: Any, problems: Problems, where: str) -> None:
        """Ignore or refuse a name that no row has."""
        if name in self._elsewhere:
            problems.invalid.append(f"'{name}' belongs {self._elsewhere[name]}")
        elif problems.unknown is UnknownParameters.WARN:
            problems.ignore(name, where)
        elif name in UNSUPPORTED:
            if raw not in _NOTHING:
                problems.unsupported.append(f"'{name}' is {show(raw)}, which is not supported: {UNSUPPORTED[name]}")
        elif problems.unknown is UnknownParameters.NOTE and self._matters_not(name, problems):
            problems.ignore(name, where)
        else:
            near = None if problems.full else self.similar(name)  # without a use beyond those that are shown
            hint = f", did you mean '{near}'?" if near else ""
            problems.invalid.append(f"unknown {where} {show(name)}{hint}")

    def _matters_not(self, name: str, problems: Problems) -> bool:
        """Whether an unknown name may be ignored: no other API has it, and it is unlike the known names."""
        few = len(problems.ignored) < _MOST_NOTED and name not in _meant
        return few and self._similar(name, _MISTYPED, *self._elsewhere) is None

    def similar(self, name: str) -> str | None:
        """The name that is most like an unknown one, None if none is."""
        return self._similar(name, _ALIKE)

    def _similar(self, name: str, likeness: float, *more: str) -> str | None:
        return _most_similar(name[:_SHOWN], (*self.rows, *more), likeness)


@lru_cache(maxsize=4096)
def _most_similar(name: str, names: tuple[str, ...], likeness: float) -> str | None:
    """The most similar name, None if none is. It takes a tenth of a millisecond, a fourth of a whole request."""
    return next(iter(difflib.get_close_matches(name, names, 1, likeness)), None)


def _log_once(level: int, what: str, where: str, name: str, why: str) -> None:
    name = name[:_SHOWN]
    if name not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(name)
        _logger.log(level, "%s %s %s in requests: %s", what, where, show(name), why)


def _bounded(given: Mapping[str, Any], problems: Problems, where: str) -> Iterable[tuple[str, Any]]:
    """The names and values that are given, none if there are too many."""
    if len(given) > _MOST_MEMBERS:
        problems.invalid.append(f"there are {len(given)} names of the kind {where}: expected at most {_MOST_MEMBERS}")
        return ()
    return [item for item in given.items() if item[1] is not None]


def _listed(names: list[str]) -> str:
    """The first names and the number of the others, for a header."""
    more = len(names) - _MOST_PROBLEMS
    return ", ".join(map(in_header, names[:_MOST_PROBLEMS])) + (f" and {more} more" if more > 0 else "")


def in_header(name: str) -> str:
    """The name inside the quotation marks of a header."""
    return ascii(name[:_SHOWN])[1:-1].replace('"', '\\"')


def read_object(request: RawRequest, example: str = "") -> dict[str, Any]:
    """The body, a JSON object; `example` is the name of a member. Raises InvalidRequestError."""
    payload = request.json
    if type(payload) is not dict:
        wanted = f" with '{example}'" if example else ""
        raise InvalidRequestError(f"the body is {show(payload)}: expected a JSON object{wanted}")
    return payload


def check_text(payload: Mapping[str, Any], name: str, problems: Problems) -> None:
    """Refuse a text that is missing or empty, unless something else is wrong, too."""
    if not payload.get(name) and not problems.invalid:
        problems.invalid.append(f"'{name}' {found(payload.get(name))}: expected a text that is not empty")


def found(value: object) -> str:
    """The predicate of an error about a required value: "is 3", or "is missing"."""
    return "is missing" if value is None else f"is {show(value)}"


def show(value: object) -> str:
    """The value as JSON, at most about 80 characters of it."""
    text = ""
    for part in _parts(value):
        text += part
        if len(text) > _SHOWN:
            return f"{text[:_SHOWN]}…"
    return text


def _parts(value: object) -> Iterator[str]:
    """The value's JSON in parts, each made only when it is wanted: the value may be large."""
    if isinstance(value, dict):
        yield "{"
        for position, (name, member) in enumerate(value.items()):
            yield "," if position else ""
            yield from _parts(name)
            yield ":"
            yield from _parts(member)
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "["
        for position, item in enumerate(value):
            yield "," if position else ""
            yield from _parts(item)
        yield "]"
    else:
        cut = value[: _SHOWN + 1] if isinstance(value, str) else value
        try:
            yield orjson.dumps(cut).decode()
        except TypeError:  # not from JSON: made by a model directory's own formatter
            yield repr(cut)


def integer(low: int, high: int | None = None) -> Kind:
    """A JSON integer of `low` to `high`, both included."""
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def read(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
                raise ValueError(f" (written without a decimal point: {int(value)})")
            raise ValueError(_unquote(value))
        if value < low or (high is not None and value > high):
            raise ValueError("")
        return value

    return Kind(expected, read, {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high}))


_SMALLEST = 2.0**-126
"""Engines have numbers of 32 bits, in which a smaller one may be 0."""


def number(low: float, high: float = math.inf, *, above: bool = False) -> Kind:
    """A finite JSON number of `low` to `high`; `low` itself is out of range if `above`."""
    if high == math.inf:
        expected = f"a number {'greater than' if above else 'of at least'} {low:g}"
    else:
        expected = f"a number {'greater than' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"

    def read(value: Any) -> float:
        if type(value) is not float and type(value) is not int:
            raise ValueError(_unquote(value))
        if not low <= value <= high or (above and value <= low + _SMALLEST) or math.isinf(value):
            raise ValueError("")
        return float(value)

    schema = {"type": "number", "exclusiveMinimum" if above else "minimum": low}
    return Kind(expected, read, schema if high == math.inf else schema | {"maximum": high})


def _of_type(expected: str, kind: type, name: str) -> Kind:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(_unquote(value) if kind is bool else "")
        return value

    return Kind(expected, read, {"type": name})


def one_of(expected: str, *values: str) -> Kind:
    """One of these texts."""

    def read(value: Any) -> str:
        if value not in values:
            raise ValueError("")
        return str(value)

    return Kind(expected, read, {"enum": [*values]})


def _read_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if type(value) is str else value
    if type(strings) is not list or len(strings) > _MOST_STRINGS:
        raise ValueError("")
    if not all(type(item) is str and item for item in strings):
        raise ValueError("")
    if (longest := max(map(len, strings), default=0)) > LONGEST_STRING:
        raise ValueError(f" (one has {longest} characters, at most {LONGEST_STRING} are accepted)")
    return tuple(dict.fromkeys(strings))


def _read_strings_or_none(value: Any) -> tuple[str, ...]:
    return () if value in ("", []) else _read_strings(value)


def read_words(value: Any) -> tuple[str, ...]:
    """Words as Triton's and Truss's clients send them: an empty word, or none, means none."""
    words = [value] if type(value) is str else value
    if type(words) is list and len(words) <= _MOST_WORDS:
        words = [word for word in words if word != ""]
    return _read_strings_or_none(words)


def _read_token_ids(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > _MOST_IDS:
        raise ValueError("")
    if not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise ValueError("")
    return tuple(dict.fromkeys(value))


def _list(items: Mapping[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most}


_NOT_EMPTY = {"type": "string", "minLength": 1}
_WORD = {**_NOT_EMPTY, "maxLength": LONGEST_STRING}

BOOLEAN = _of_type("true or false", bool, "boolean")
TEXT = _of_type("a string", str, "string")
PROMPT = Kind("a string", TEXT.read, _NOT_EMPTY)
"""A text that must not be empty, which the dialects themselves check."""
STRINGS = Kind(
    f"a string or a list of up to {_MOST_STRINGS} strings, none of them empty",
    _read_strings,
    {"anyOf": [_WORD, _list(_WORD, _MOST_STRINGS)]},
)
STRINGS_OR_NONE = Kind(
    f"a string or a list of up to {_MOST_STRINGS} strings, none in the list empty",
    _read_strings_or_none,
    {"anyOf": [{"type": "string"}, _list(_WORD, _MOST_STRINGS)]},
)
TOKEN_IDS = Kind(
    f"a list of up to {_MOST_IDS} token ids",
    _read_token_ids,
    _list({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, _MOST_IDS),
)
OBJECT = _of_type("an object", dict, "object")


_ID_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


class TextsOrIds:
    """A parameter whose value is a text or token ids, or a list of `most` of either. `empty`: texts may be empty."""

    def __init__(self, name: str, most: int, *, empty: bool) -> None:
        text = TEXT.schema if empty else _NOT_EMPTY
        several = {"type": "array", "items": {"anyOf": [text, _ID_LIST]}, "minItems": 1, "maxItems": most}
        expected = f"a text, a list of token ids, or a list of up to {most} of either"
        self.kind = Kind(expected, lambda value: value, {"anyOf": [text, _ID_LIST, several]})
        self._name, self._most, self._empty = name, most, empty

    def read(self, payload: Mapping[str, Any], vocabulary: int, problems: Problems) -> list[str | list[int]]:
        """Return the texts and lists of token ids, none with a problem."""
        value, expected = payload.get(self._name), f"expected {self.kind.expected}"
        alone = type(value) is str or (type(value) is list and bool(value) and type(value[0]) is int)
        items: Any = [value] if alone else value
        if type(items) is not list or not 0 < len(items) <= self._most:
            problems.invalid.append(f"'{self._name}' {found(value)}: {expected}")
            return []
        for item in items:
            if type(item) is list and item:
                wrong = [id_ for id_ in item if type(id_) is not int or not 0 <= id_ < vocabulary]
            else:
                wrong = [] if type(item) is str and (item or self._empty) else [item]
            if wrong:
                more = "" if self._empty else ", none of them empty"
                problems.invalid.append(
                    f"'{self._name}' has {show(wrong[0])}: {expected}{more}, with ids from 0 to {vocabulary - 1}"
                )
                return []
        return list(items)


def _described(name: str, row: Parameter, required: bool) -> dict[str, Any]:
    """The schema of the values of one name; null, which means not given, too, unless it is required."""
    if row.target is None:
        # `read` takes 0 for false and 1 for true, where the parameter changes nothing.
        numbers = {int(value) for value in row.neutral if type(value) is bool}
        numbers -= {value for value in row.neutral if type(value) is int}
        description = f"Accepted for compatibility. {row.advice}".strip()
        return {"enum": [*row.neutral, *sorted(numbers), None], "description": description}
    if row.kind is None or not row.kind.schema:
        return {"description": "Accepted, without effect."} if row.target == IGNORED else {}
    schema = dict(row.kind.schema)
    if not required:
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema if name == row.names[0] else schema | {"description": f"The same as {row.names[0]}."}


def _unquote(value: object) -> str:
    """The hint for a value that would be right without its quotation marks."""
    if isinstance(value, str) and len(value) <= _SHOWN:
        try:
            inner = orjson.loads(value.lower())
        except orjson.JSONDecodeError:
            return ""
        if isinstance(inner, (bool, int, float)):
            return " (written without quotation marks)"
    return ""


def _not_accepted(row: Parameter) -> str:
    accepted = " or ".join(show(neutral) for neutral in row.neutral)
    what = f"values other than {accepted} are" if accepted else "it is"
    advice = f": {row.advice}" if row.advice else ""
    return f"{what} not supported by this backend{advice}"
