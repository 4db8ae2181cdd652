"""JSON schemas as EBNF grammars, for engines that compile guides with xgrammar.

`{"type": "integer", "minimum": 3, "maximum": 12}` becomes `[3-9] | "1" [0-2]`. All that a grammar lets through fits the
schema, in the order of its properties and with limited white space: xgrammar's own conversion allows any amount, and
small models then write nothing else until their tokens are used up. Keywords that a grammar does not follow are named
in `JsonGrammar.not_followed`: no list of what xgrammar ignores has to be kept beside its releases.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from djl_trtllm.backends.pattern_grammar import FORMATS, Pattern, PatternError, counted, digits, literal, ranged
from djl_trtllm.config.options.choices import GuidedDecoding
from djl_trtllm.request import Guide, GuideKind

_BASE = {
    "ws": r'("\n" [ ]{0,8} | " ")?',
    "hex": "[0-9a-fA-F]",
    # Without halves of surrogate pairs, which are no characters.
    "escape": r'"\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] hex hex hex | [dD] [0-7] hex hex))',
    "char": r'[^"\\\x00-\x1f] | escape',
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,17})',
    "number": '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,15})? ([eE] [+-]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)* ws)? "}"',
    "array": '"[" ws (value (ws "," ws value)* ws)? "]"',
}
_MOST_INTEGER = 10**18 - 1
_MOST_NUMBER = 10**15 - 1
_DECIMALS = 15
_FRACTION = '("." [0-9]{1,15})?'
_MOST_SCHEMAS = 20_000
"""Parts of a schema that are converted, those that several places refer to more than once."""
_LONGEST_SHOWN = 60
_MOST_KEPT = 64

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS = {
    "string": ("pattern", "format", "minLength", "maxLength"),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
        *("minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "required", "additionalProperties", "propertyNames", "patternProperties", "minProperties"),
        *("maxProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    ),
}
"""Keywords by the type that they are about: values of other types fit any of them."""
_OTHERS = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")
"""Keywords for values of any type that no grammar follows. A keyword named neither here nor above is an annotation."""


GUIDE_PROGRAM = "djl_trtllm.backends.{}_process"
"""The program that tries guides with a library, by its name: xgrammar or llguidance."""


class SchemaError(ValueError):
    """A schema that is invalid, or that no value fits."""


class _NoValueError(SchemaError):
    """No value fits a part of the schema, which may be one of several."""


class JsonGrammar(NamedTuple):
    """`not_followed` has each keyword that the grammar does not follow, with its place."""

    text: str
    not_followed: tuple[str, ...] = ()


def as_grammar(guide: Guide) -> tuple[Guide, tuple[str, ...]]:
    """A guide as xgrammar takes it (JSON as a grammar), and keywords not followed. Raises SchemaError."""
    if guide.kind is GuideKind.JSON_OBJECT:
        return Guide(GuideKind.GRAMMAR, any_object()), ()
    if guide.kind is not GuideKind.JSON_SCHEMA:
        return guide, ()
    text, not_followed = grammar_of(guide.value)
    return Guide(GuideKind.GRAMMAR, text, guide.strict), not_followed


def with_options(guide: Guide) -> Guide:
    """A guide as llguidance takes it: JSON with the white space of `json.dumps`. If the guide is strict, a keyword that
    llguidance does not follow is an error. Its `whitespace_pattern` may repeat, so it limits nothing."""
    if guide.kind not in (GuideKind.JSON_OBJECT, GuideKind.JSON_SCHEMA):
        return guide
    schema = {"type": "object"} if guide.kind is GuideKind.JSON_OBJECT else json.loads(guide.value)
    if not isinstance(schema, dict):
        return guide
    options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    options["lenient"] = not guide.strict
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema | {"x-guidance": options}), guide.strict)


def guide_arguments(guide: Guide, library: str | None) -> dict[str, str]:
    """The arguments of TensorRT-LLM's GuidedDecodingParams and vLLM's StructuredOutputsParams. Raises SchemaError."""
    guide = with_options(guide) if library == GuidedDecoding.LLGUIDANCE else as_grammar(guide)[0]
    return {guide.kind.value.removesuffix("_schema"): guide.value}


def any_object() -> str:
    """The grammar of all JSON objects."""
    return _text({"root": "object"})


@lru_cache(_MOST_KEPT)
def grammar_of(schema: str) -> JsonGrammar:
    """The grammar of a JSON schema, given as JSON. Raises SchemaError.

    The last ones are kept: engines ask for the grammar of each request in the loop that serves all.
    """
    try:
        converter = _Converter(json.loads(schema))
        root = converter.root()
    except RecursionError:
        raise SchemaError("the schema is nested too deep, or a part of it refers to itself at once") from None
    except json.JSONDecodeError as error:
        raise SchemaError(f"the schema is not JSON: {error}") from None
    return JsonGrammar(_text({"root": root} | converter.rules), tuple(converter.not_followed))


_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\{\d+|\w+|[()|?*]')
_Needs: TypeAlias = dict[str, list[list[str]]]
"""The alternatives of rules and groups, each with the rules, groups and texts that it cannot do without."""


def _needs(name: str, body: str) -> _Needs:
    """The alternatives of a rule, and of the groups in it, each with the names that it needs."""
    found: _Needs = {name: [[]]}
    inside = [name]
    for piece in _PIECE.findall(body):
        if piece == "(":
            inside.append(f"{name}({len(found)}")
            found[inside[-1]] = [[]]
        elif piece == ")":
            group = inside.pop()
            found[inside[-1]][-1].append(group)
        elif piece == "|":
            found[inside[-1]].append([])
        elif piece in ("?", "*", "{0"):
            found[inside[-1]][-1].pop()
        elif piece[0] != "{":
            found[inside[-1]][-1].append(piece)
    return found


def _endless(needs: _Needs) -> set[str]:
    """The rules and groups whose texts have no end, because each alternative needs another such rule.

    Each alternative counts down what it waits for (Dowling and Gallier, 1984), so this is as fast as reading them.
    """
    endless = set(needs)
    ended: list[str] = []
    owners: list[str] = []
    counts: list[int] = []
    waiting: dict[str, list[int]] = {name: [] for name in needs}
    for name, alternatives in needs.items():
        for pieces in alternatives:
            rules = [piece for piece in pieces if piece in needs]
            for rule in rules:
                waiting[rule].append(len(counts))
            owners.append(name)
            counts.append(len(rules))
            ended += [] if rules else [name]
    while ended:
        name = ended.pop()
        if name in endless:
            endless.remove(name)
            for at in waiting[name]:
                counts[at] -= 1
                ended += [] if counts[at] else [owners[at]]
    return endless


def _text(rules: dict[str, str]) -> str:
    return "\n".join(f"{name} ::= {body}" for name, body in (_BASE | rules).items())


class _Converter:
    def __init__(self, schema: Any) -> None:
        self.rules: dict[str, str] = {}
        self.not_followed: dict[str, None] = {}
        self._names: dict[str, str] = {}
        self._schema = schema
        self._references: dict[str, str] = {}
        self._recursive = False
        self._left = _MOST_SCHEMAS
        self._kinds: dict[str, Callable[[dict[str, Any], str], str]] = {
            "string": self._string,
            "object": self._object,
            "array": self._array,
            "integer": self._integer,
            "number": self._number,
        }

    def root(self) -> str:
        """The rule of the whole schema. Raises SchemaError."""
        name = self._reference("#")
        if self._recursive:
            self._require_ends()
        return name

    def _require_ends(self) -> None:
        """Raise SchemaError for a part of the schema that refers to itself at once, or whose values have no end."""
        needs: _Needs = {}
        for name, body in self.rules.items():
            needs |= _needs(name, body)
        try:
            TopologicalSorter({name: [each[0] for each in needs[name] if len(each) == 1] for name in needs}).prepare()
        except CycleError as error:
            pointer = next(pointer for pointer, rule in self._references.items() if rule in error.args[1])
            raise SchemaError(f"{pointer} refers to itself at once: expected an object or an array between") from None
        endless = _endless(needs)
        for pointer, rule in self._references.items():
            if rule in endless:
                raise SchemaError(f"no value fits {pointer}: it has to contain itself, without end")

    def _rule(self, body: str) -> str:
        """The name of a rule; equal ones are one, which xgrammar compiles once."""
        if not body or body not in self._names:
            self._names[body] = f"r{len(self.rules)}"
            self.rules[self._names[body]] = body
        return self._names[body]

    def _leave_out(self, keyword: str, where: str) -> None:
        self.not_followed[f"'{keyword}' at {where}"] = None

    def _convert(self, schema: Any, where: str) -> str:
        """Return the expression of a schema: the name of a rule, or an expression in parentheses."""
        self._left -= 1
        if self._left < 0:
            raise SchemaError(f"the schema is too large: with its references it has over {_MOST_SCHEMAS} parts")
        if schema is True:
            return "value"
        if schema is False:
            raise _NoValueError(f"no value fits {where}, which is false")
        if not isinstance(schema, dict):
            raise _wrong(where, schema, "a schema, which is an object or a boolean")
        for keyword in _OTHERS:
            if keyword in schema:
                self._leave_out(keyword, where)
        if "$ref" in schema and not self._has_assertions(schema, but="$ref"):
            return self._reference(schema["$ref"], where)
        schema = self._resolved(schema, where)
        for name in ("allOf", "anyOf", "oneOf"):
            if name in schema:
                return self._composed(name, schema, where)
        if "enum" in schema or "const" in schema:
            return self._values(schema, where)
        return self._typed(schema, where)

    # -- several schemas -------------------------------------------------------------------------------------------

    def _has_assertions(self, schema: dict[str, Any], *, but: str) -> bool:
        known = {"type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref"}.union(*_KEYWORDS.values())
        return any(name in known and name != but for name in schema)

    def _target(self, pointer: Any, where: str) -> Any:
        """The part of the schema that a local pointer names; None if it is elsewhere, or not named by its place."""
        if not isinstance(pointer, str):
            raise _wrong(f"{where}/$ref", pointer, "a text such as #/$defs/name")
        if pointer != "#" and not pointer.startswith("#/"):
            self._leave_out("$ref", where)
            return None
        found = self._schema
        for part in pointer[1:].split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                raise _wrong(f"{where}/$ref", pointer, "the place of a part of the schema")
        return found

    def _reference(self, pointer: str, where: str = "#") -> str:
        """The rule of a part of the schema; it may refer to itself."""
        if not isinstance(pointer, str) or pointer not in self._references:
            target = self._target(pointer, where)
            if target is None:
                return "value"
            name = self._references[pointer] = self._rule("")
            self.rules[name] = self._convert(target, pointer)
        self._recursive |= not self.rules[self._references[pointer]]  # it is being made
        return self._references[pointer]

    def _resolved(self, schema: Any, where: str) -> dict[str, Any]:
        """The schema, with the keywords of the schema that its reference names."""
        for _ in range(_MOST_SCHEMAS):
            if not isinstance(schema, dict):
                return {} if schema is True else {"enum": []}
            if "$ref" not in schema:
                return schema
            target, own = self._target(schema["$ref"], where), {**schema}
            del own["$ref"]
            if target is None or target is True:
                schema = own
            elif (merged := _merged(target, own)) is not None:
                schema = merged
            else:
                self._leave_out("$ref", where)
                schema = own
        raise _wrong(f"{where}/$ref", "", "no reference to itself")

    def _composed(self, name: str, schema: dict[str, Any], where: str) -> str:
        own, items = {**schema}, schema[name]
        del own[name]
        if not isinstance(items, list) or not items:
            raise _wrong(f"{where}/{name}", items, "a list of schemas")
        items = [self._resolved(item, f"{where}/{name}/{at}") for at, item in enumerate(items)]
        if name == "allOf":
            for item in items:
                merged = _merged(own, item)
                if merged is None:
                    self._leave_out(name, where)
                own = own if merged is None else merged
            return self._convert(own, where)
        if name == "oneOf" and not _exclusive(items):
            self._leave_out(name, where)
        found: list[str] = []
        bare = not self._has_assertions(own, but="")
        for at, item in enumerate(items):
            # A reference stays one: it may be to a part in which this stands.
            merged = schema[name][at] if bare else _merged(own, item)
            if merged is None:
                self._leave_out(name, where)
                return self._convert(own, where)
            try:
                found.append(self._convert(merged, f"{where}/{name}/{at}"))
            except _NoValueError:
                continue
        if not found:
            raise _NoValueError(f"no value fits {where}")
        return self._rule(" | ".join(dict.fromkeys(found)))

    def _values(self, schema: dict[str, Any], where: str) -> str:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list):
            raise _wrong(f"{where}/enum", values, "a list of values")
        types = _types(schema, where)
        fitting = [
            value
            for value in values
            if any(_is(value, kind) for kind in types) and ("const" not in schema or _equal(value, schema["const"]))
        ]
        for keyword in sorted(set(schema).intersection(*[set().union(*_KEYWORDS.values())])):
            if any(keyword in _KEYWORDS.get(kind, ()) and _is(value, kind) for kind in types for value in fitting):
                self._leave_out(keyword, where)
        if not fitting:
            raise _NoValueError(f"no value fits {where}: none of its values has its type")
        return self._rule(" | ".join(literal(json.dumps(value, ensure_ascii=False)) for value in fitting))

    # -- one type --------------------------------------------------------------------------------------------------

    def _typed(self, schema: dict[str, Any], where: str) -> str:
        if "type" not in schema:
            about = [kind for kind, names in _KEYWORDS.items() if any(name in schema for name in names)]
            if not about:
                return "value"
            types = ["number"] if about == ["integer", "number"] else about[:1]
        else:
            types = _types(schema, where)
        found: list[str] = []
        problem: _NoValueError | None = None
        for kind in types:
            keywords = {name: schema[name] for name in _KEYWORDS.get(kind, ()) if name in schema}
            try:
                found.append(self._kinds[kind](keywords, where) if keywords else kind)
            except _NoValueError as error:
                problem = error
                continue
            for name in keywords:
                self._leave_out(name, where)
        if not found:
            raise problem or _NoValueError(f"no value fits {where}")
        return found[0] if len(found) == 1 else self._rule(" | ".join(found))

    def _counted(self, item: str, least: int, most: int | None) -> str:
        return counted(item, least, math.inf if most is None else most, self._rule)

    def _listed(self, begin: str, item: str, least: int, most: int | None, end: str) -> str:
        if most == 0:
            return f'"{begin}" ws "{end}"'
        more = self._counted(f'(ws "," ws {item})', max(least - 1, 0), None if most is None else most - 1)
        filled = f"{item} {more} ws"
        return f'"{begin}" ws {filled} "{end}"' if least else f'"{begin}" ws ({filled})? "{end}"'

    def _string(self, keywords: dict[str, Any], where: str) -> str:
        least, most = _counts(keywords, "minLength", "maxLength", where)
        pattern, described = keywords.pop("pattern", None), keywords.get("format")
        found: Pattern | None = None
        if pattern is not None:
            try:
                found = Pattern(pattern)
            except PatternError as error:
                if not error.only_unsupported:
                    raise _wrong(f"{where}/pattern", pattern, f"a regular expression ({error})") from None
                if described not in FORMATS:
                    keywords["pattern"] = pattern
        if found is None and isinstance(described, str) and described in FORMATS:
            found = Pattern(FORMATS[described])
        if found is None:
            return self._rule(rf'"\"" {self._counted("char", least, most)} "\""')
        # A format beside a pattern says what the pattern is for.
        keywords.pop("format", None)
        if not found.limit(least, most):
            if least > found.least:
                keywords["minLength"] = least
            if most is not None and most < found.most:
                keywords["maxLength"] = most
        return self._rule(rf'"\"" {found.text} "\""')

    def _integer(self, keywords: dict[str, Any], where: str) -> str:
        low, high = self._limits(keywords, where, 0, _MOST_INTEGER)
        if keywords.get("multipleOf") == 1:
            del keywords["multipleOf"]
        parts = [f'"-" ({ranged(max(1, -high), -low)})'] if low < 0 else []
        parts += [ranged(max(0, low), high)] if high >= 0 else []
        return self._rule(" | ".join(parts))

    def _number(self, keywords: dict[str, Any], where: str) -> str:
        decimals = 0
        for name in _BOUNDS[:4]:
            bound = keywords.get(name)
            if bound is not None and _is(bound, "number") and math.isfinite(bound):
                exponent = Decimal(str(bound)).normalize().as_tuple().exponent
                assert isinstance(exponent, int)
                decimals = max(decimals, -exponent + 2 * name.startswith("exclusive"))
        decimals = min(decimals, _DECIMALS)
        low, high = self._limits(keywords, where, decimals, _MOST_NUMBER * 10**decimals)
        parts = [f'"-" ({_fixed(max(0, -high), -low, decimals)})'] if low < 0 else []
        parts += [_fixed(max(0, low), high, decimals)] if high >= 0 else []
        return self._rule(" | ".join(parts))

    def _limits(self, keywords: dict[str, Any], where: str, decimals: int, most: int) -> tuple[int, int]:
        """The least and greatest value, in units of the last decimal; a value beyond `most` is left out."""
        limits = {"minimum": -most, "maximum": most}
        for name in _BOUNDS[:4]:
            if name not in keywords:
                continue
            bound, lower = keywords[name], name.lower().endswith("minimum")
            if not _is(bound, "number") or not math.isfinite(bound):
                if isinstance(bound, bool) and name.startswith("exclusive"):
                    continue  # as in draft 4: not followed
                raise _wrong(f"{where}/{name}", bound, "a number")
            scaled = (
                Decimal(str(bound)).scaleb(decimals) if abs(bound) < 10**20 else Decimal(math.copysign(1e40, bound))
            )
            if abs(scaled) > most and lower == (scaled > 0):
                continue  # above all numbers of the grammar, or below: not followed
            at = int(scaled.to_integral_value("ROUND_CEILING" if lower else "ROUND_FLOOR"))
            if name.startswith("exclusive") and at == scaled:
                at += 1 if lower else -1
            key, choose = ("minimum", max) if lower else ("maximum", min)
            limits[key] = choose(limits[key], at)
            del keywords[name]
        if limits["minimum"] > limits["maximum"]:
            raise _NoValueError(f"no number fits {where}")
        return limits["minimum"], limits["maximum"]

    def _array(self, keywords: dict[str, Any], where: str) -> str:
        least, most = _counts(keywords, "minItems", "maxItems", where)
        first, items = keywords.pop("prefixItems", []), keywords.pop("items", True)
        if isinstance(items, list):  # drafts before 2020-12
            first, items = items, keywords.pop("additionalItems", True)
        keywords.pop("additionalItems", None)
        if not isinstance(first, list):
            raise _wrong(f"{where}/prefixItems", first, "a list of schemas")
        if keywords.get("uniqueItems") is False or (most is not None and most < 2):
            keywords.pop("uniqueItems", None)
        if keywords.get("unevaluatedItems") is False:
            items = False if items is True else items
            del keywords["unevaluatedItems"]
        first = [self._convert(item, f"{where}/prefixItems/{at}") for at, item in enumerate(first[:most])]
        rest_least, rest_most = max(0, least - len(first)), None if most is None else most - len(first)
        item = "value"
        if rest_most != 0:
            try:
                item = self._convert(items, f"{where}/items")
            except _NoValueError:
                rest_most = 0
        if rest_most == 0 < rest_least:
            raise _NoValueError(f"no array fits {where}: it has to have more items than it may have")
        body = ' ws "," ws '.join(first)
        if rest_most == 0:
            return self._rule(f'"[" ws {body} ws "]"' if first else '"[" ws "]"')
        if first:
            rest = self._counted(f'(ws "," ws {item})', rest_least, rest_most)
            return self._rule(f'"[" ws {body} {rest} ws "]"')
        return self._rule(self._listed("[", item, least, most, "]"))

    def _object(self, keywords: dict[str, Any], where: str) -> str:
        properties, required = keywords.pop("properties", {}), keywords.pop("required", [])
        if not isinstance(properties, dict):
            raise _wrong(f"{where}/properties", properties, "an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _wrong(f"{where}/required", required, "a list of names")
        least, most = _counts(keywords, "minProperties", "maxProperties", where)
        others = keywords.pop("additionalProperties", True)
        if keywords.get("unevaluatedProperties") is False:
            others = False if others is True else others
            del keywords["unevaluatedProperties"]
        if not properties and not required:
            return self._map(others, least, most, keywords, where)
        properties = properties | {name: others for name in required if name not in properties}
        members: list[tuple[str, bool]] = []
        for name, schema in properties.items():
            try:
                value = self._convert(schema, f"{where}/properties/{name}")
            except _NoValueError:
                if name in required:
                    raise
                continue
            key = literal(json.dumps(name, ensure_ascii=False))
            members.append((self._rule(f'{key} ws ":" ws {value}'), name in required))
        if least > len(set(required)):
            keywords["minProperties"] = least
        if most is not None and most < len(members):
            keywords["maxProperties"] = most
        if keywords.get("propertyNames") in (True, {}, {"type": "string"}):
            del keywords["propertyNames"]
        return self._members(members)

    def _map(self, others: Any, least: int, most: int | None, keywords: dict[str, Any], where: str) -> str:
        names, patterns = keywords.pop("propertyNames", {}), keywords.get("patternProperties")
        if isinstance(patterns, dict) and len(patterns) == 1 and others is False:
            ((pattern, others),) = patterns.items()
            names = {"pattern": pattern}
            del keywords["patternProperties"]
        try:
            value = self._convert(others, f"{where}/additionalProperties")
            key = self._convert(
                {"type": "string"} | names if isinstance(names, dict) else names, f"{where}/propertyNames"
            )
        except _NoValueError:
            if least:
                raise
            return self._rule('"{" ws "}"')
        if least > 1:
            keywords["minProperties"] = least  # a name may come twice
        return self._rule(self._listed("{", f'{key} ws ":" ws {value}', least, most, "}"))

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        rest = '""'
        begins: list[str] = []
        # From the last: `rest` is what may follow a property, `begins` the properties that may be the first.
        for member, required in reversed(members):
            begin = f"{member} {rest}"
            if required:
                begins, rest = [begin], self._rule(f'ws "," ws {member} {rest}')
            else:
                begins, rest = [begin, *begins], self._rule(f'(ws "," ws {member})? {rest}')
        if not begins:
            return self._rule('"{" ws "}"')
        whole = f"({' | '.join(begins)}) ws"
        optional = not any(required for _, required in members)
        return self._rule(f'"{{" ws ({whole})? "}}"' if optional else f'"{{" ws {whole} "}}"')


# -- schemas -----------------------------------------------------------------------------------------------------------


def _wrong(where: str, value: Any, expected: str) -> SchemaError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"
    return SchemaError(f"{where} is {shown}: expected {expected}")


def _types(schema: dict[str, Any], where: str) -> list[str]:
    given = schema.get("type", list(_TYPES))
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not types or not all(isinstance(kind, str) and kind in _TYPES for kind in types):
        raise _wrong(f"{where}/type", given, f"one of {', '.join(_TYPES)}, or a list of them")
    return list(dict.fromkeys(types))


def _is(value: Any, kind: str) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _merged(one: Any, other: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of the values that fit both schemas; None if the keywords of both together do not express it."""
    if not isinstance(one, dict):
        return None
    merged = {**one}
    for name, value in other.items():
        if name not in merged or _equal(merged[name], value):
            merged[name] = value
        elif name in ("required", "allOf") and isinstance(value, list) and isinstance(merged[name], list):
            merged[name] = [*merged[name], *value]
        elif name == "properties" and isinstance(value, dict) and isinstance(merged[name], dict):
            if any(merged[name].get(key, item) != item for key, item in value.items()):
                return None
            merged[name] = merged[name] | value
        elif name not in _ANNOTATIONS:
            return None
    closed = "additionalProperties" in merged and merged["additionalProperties"] is not True
    if closed and one.get("properties", {}) != other.get("properties", {}):
        holder, rest = (one, other) if "additionalProperties" in one else (other, one)
        if (
            "additionalProperties" in rest
            or not rest.get("properties", {}).keys() <= holder.get("properties", {}).keys()
        ):
            return None
    return merged


_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"),
        *("deprecated", "readOnly", "writeOnly"),
    }
)


def _exclusive(items: Sequence[dict[str, Any]]) -> bool:
    """Whether no value fits two of these schemas, as far as their types and constant properties say."""
    kinds = [set(_types(item, "")) - ({"integer"} if "number" in _types(item, "") else set()) for item in items]
    kinds = [{"number" if kind == "integer" else kind for kind in each} for each in kinds]
    if all("type" in item for item in items) and sum(map(len, kinds)) == len(set().union(*kinds)):
        return True
    constants: list[dict[str, str]] = []
    for item in items:
        properties, required = item.get("properties"), item.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return False
        constants.append(
            {
                name: json.dumps(value)
                for name, schema in properties.items()
                if name in required and isinstance(schema, dict) and (value := _constant(schema)) is not None
            }
        )
    shared = set(constants[0]).intersection(*constants)
    return any(len({each[name] for each in constants}) == len(items) for name in shared)


def _constant(schema: dict[str, Any]) -> Any:
    values = schema.get("enum")
    return values[0] if isinstance(values, list) and len(values) == 1 else schema.get("const")


# -- expressions -------------------------------------------------------------------------------------------------------


def _counts(keywords: dict[str, Any], least: str, most: str, where: str) -> tuple[int, int | None]:
    """Take two counts out of the keywords."""
    low, high = keywords.pop(least, 0), keywords.pop(most, None)
    for name, value in ((least, low), (most, high)):
        if value is not None and not (_is(value, "integer") and value >= 0):
            raise _wrong(f"{where}/{name}", value, "an integer of at least 0")
    if high is not None and high < low:
        raise _NoValueError(f"no value fits {where}: its {least} is above its {most}")
    return int(low), None if high is None else int(high)


def _fixed(low: int, high: int, decimals: int) -> str:
    """Numbers that are not negative, between two in units of their last decimal."""
    unit = 10**decimals
    (whole, part), (last, last_part) = divmod(low, unit), divmod(high, unit)
    width = f"0{decimals}d"
    if whole == last:
        if not part and not last_part:
            return f'"{whole}"'
        return f'"{whole}." {digits(f"{part:{width}}", f"{last_part:{width}}")}'
    parts = [f'"{whole}." {digits(f"{part:{width}}", "9" * decimals)}'] if part else []
    first = whole + bool(part)
    parts += [f"({ranged(first, last - 1)}) {_FRACTION}"] if first < last else []
    end = f' ("." {digits("0" * decimals, f"{last_part:{width}}")})?' if last_part else ""
    return " | ".join([*parts, f'"{last}"{end}'])
