r"""Regular expressions and ranges of numbers as EBNF expressions, inside a JSON string and beside it.

`^[a-z]{2}\d?$` becomes `[a-z]{2,2} [0-9]?`. The syntax is ECMAScript's, as in JSON schemas; look-around, references to
groups and anchors inside an expression are not supported.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

_Ranges = list[tuple[int, int]]

_LAST = 0x10FFFF
_ASCII = 0x7F
_PLAIN: _Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, _ASCII)]
"""ASCII characters that JSON strings have without an escape."""
_MOST_BEYOND = 64
"""The most characters beyond ASCII that are listed one by one."""
_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_DIGIT: _Ranges = [(0x30, 0x39)]
_WORD: _Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: _Ranges = [(0x09, 0x0D), (0x20, 0x20)]
_LINE_ENDS: _Ranges = [(0x0A, 0x0A), (0x0D, 0x0D)]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = dict(zip("0tnvfr", b"\0\t\n\v\f\r", strict=True))
_WRITTEN_OUT, _BLOCK = 128, 64
"""The largest count that xgrammar writes out, and the size of the blocks that larger ones are made of."""
_MOST_REPETITIONS = 65_536
_LONGEST_COUNT = 16
"""Characters of `{65536,65536}`, and some more."""

_DAY = r"(((0[13578]|1[02])-(0[1-9]|[12]\d|3[01]))|((0[469]|11)-(0[1-9]|[12]\d|30))|(02-(0[1-9]|1\d|2[0-8])))"
_DATE = rf"[12]\d{{3}}-{_DAY}"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": r"^P(\d{1,4}W|\d{1,4}D(T\d{1,4}H(\d{1,4}M(\d{1,4}S)?)?)?|T(\d{1,4}H)?\d{1,4}M|T\d{1,4}[HS])$",
    "email": rf"^[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,16}}){{0,2}}@({_LABEL}\.){{1,4}}[a-z]{{2,8}}$",
    "hostname": rf"^({_LABEL}\.){{0,4}}{_LABEL}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "ipv6": r"^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$",
    "uri": rf"^(https?|ftp)://({_LABEL}\.){{0,4}}{_LABEL}(:[1-9]\d{{0,3}})?(/[A-Za-z0-9._~-]{{0,64}}){{0,8}}$",
}
"""A pattern for each format. Every text that fits the pattern has the format, but not the reverse."""


class PatternError(ValueError):
    """The pattern cannot be read; `only_unsupported` if other libraries can read it."""

    def __init__(self, problem: str, *, only_unsupported: bool = False) -> None:
        super().__init__(problem)
        self.only_unsupported = only_unsupported


def literal(text: str) -> str:
    """A text as a string of EBNF."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def digits(low: str, high: str) -> str:
    """An expression for the numbers from `low` to `high`, two texts with equally many digits."""
    rest = len(low) - 1
    if low == high:
        return f'"{low}"'
    if not rest:
        return f"[{low}-{high}]"
    if low[0] == high[0]:
        return f'"{low[0]}" {digits(low[1:], high[1:])}'
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:] != "0" * rest:
        parts, first = [f'"{first}" {digits(low[1:], "9" * rest)}'], first + 1
    end = []
    if high[1:] != "9" * rest:
        end, last = [f'"{last}" {digits("0" * rest, high[1:])}'], last - 1
    if first <= last:
        parts.append(f"[{first}-{last}] [0-9]{{{rest},{rest}}}")
    return f"({' | '.join(parts + end)})"


def ranged(low: int, high: int) -> str:
    """An expression for the integers from `low` to `high` (0 or more): alternatives by their number of digits."""
    parts = []
    while low <= high:
        end = min(high, 10 ** len(str(low)) - 1)
        longest = len(str(high)) - (high != 10 ** len(str(high)) - 1)
        if low == 10 ** (len(str(low)) - 1) and len(str(low)) <= longest:
            end = 10**longest - 1  # all of these lengths
            parts.append(f"[1-9] [0-9]{{{len(str(low)) - 1},{longest - 1}}}")
        else:
            parts.append(digits(str(low), str(end)))
        low = end + 1
    return " | ".join(parts)


class _Part(NamedTuple):
    """An expression, and how many characters its texts have. `unit`: the expression whose repetition it is."""

    text: str
    least: int
    most: float
    unit: str = ""


_ANY = _Part("char*", 0, math.inf)


class Pattern:
    """A regular expression as an expression for the characters of a JSON string. Raises PatternError."""

    def __init__(self, pattern: object) -> None:
        if not isinstance(pattern, str):
            raise PatternError("it is not a text")
        self._pattern, self._at = pattern, 0
        self._part = self._alternatives(outermost=True)
        if self._at < len(pattern):
            raise PatternError(f"the parenthesis at {self._at} is not opened")

    @property
    def text(self) -> str:
        return self._part.text

    @property
    def least(self) -> int:
        return self._part.least

    @property
    def most(self) -> float:
        return self._part.most

    def limit(self, least: int, most: int | None) -> bool:
        """Bound the number of characters. False if it stays as it is and allows others."""
        part, high = self._part, math.inf if most is None else most
        if part.least >= least and part.most <= high:
            return True
        low, high = max(least, part.least), min(high, part.most)
        if not part.unit or low > high:
            return False
        self._part = _repeated(part.unit, low, high)
        return True

    # -- reading ---------------------------------------------------------------------------------------------------

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _alternatives(self, *, outermost: bool = False) -> _Part:
        parts = [self._sequence(outermost=outermost)]
        while self._take("|"):
            parts.append(self._sequence(outermost=outermost))
        if len(parts) == 1:
            return parts[0]
        text = f"({' | '.join(part.text for part in parts)})"
        return _Part(text, min(part.least for part in parts), max(part.most for part in parts))

    def _sequence(self, *, outermost: bool) -> _Part:
        """Read the parts up to the next | or ). A pattern without anchors may stand anywhere in the text."""
        parts = [] if not outermost or self._take("^") else [_ANY]
        while (character := self._next()) and character not in "|)":
            if character == "$" and outermost and self._pattern[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                break
            parts.append(self._repeated())
        else:
            parts += [_ANY] if outermost else []
        if len(parts) == 1:
            return parts[0]
        text = " ".join(part.text for part in parts) or '""'
        return _Part(text, sum(part.least for part in parts), sum(part.most for part in parts))

    def _repeated(self) -> _Part:
        part = self._atom()
        times = self._times()
        if times is None:
            return part
        low, high = times
        if part.unit and part.least == part.most == 1:
            return _repeated(part.unit, low, high)
        most = 0.0 if not high or not part.most else part.most * high
        return _Part(counted(f"({part.text})", low, high), part.least * low, most)

    def _times(self) -> tuple[int, float] | None:
        if self._take("*"):
            low, high = 0, math.inf
        elif self._take("+"):
            low, high = 1, math.inf
        elif self._take("?"):
            low, high = 0, 1
        elif self._next() != "{":
            return None
        else:
            end = self._pattern.find("}", self._at, self._at + _LONGEST_COUNT)
            first, comma, second = self._pattern[self._at + 1 : end].partition(",")
            if end < 0 or not first.isdecimal() or not (second.isdecimal() or not second):
                return None
            low = int(first)
            high = (int(second) if second else math.inf) if comma else low
            if max(low, 0 if high == math.inf else high) > _MOST_REPETITIONS or low > high:
                raise PatternError(f"the numbers at {self._at} are above {_MOST_REPETITIONS}, or in the wrong order")
            self._at = end + 1
        self._take("?")  # how much is matched first does not matter
        return low, high

    def _atom(self) -> _Part:
        start, character = self._at, self._next()
        self._at += 1
        if character == "(":
            return self._group(start)
        if character == "[":
            return _one_of(self._set(start))
        if character == ".":
            return _one_of(_inverted(_LINE_ENDS))
        if character == "\\":
            return _one_of(self._escape())
        if character in "^$":
            raise PatternError(f"the anchor at {start} is inside the expression", only_unsupported=True)
        if character in "*+?":
            raise PatternError(f"there is nothing to repeat at {start}")
        return _one_of([(ord(character), ord(character))])

    def _group(self, start: int) -> _Part:
        if self._take("?<") and self._next() not in ("=", "!"):
            self._at = self._pattern.find(">", self._at) + 1 or len(self._pattern)
        elif not self._take("?:") and self._next() == "?":
            raise PatternError(f"look-around or flags at {start}", only_unsupported=True)
        part = self._alternatives()
        if not self._take(")"):
            raise PatternError(f"the parenthesis at {start} is not closed")
        return part

    def _set(self, start: int) -> _Ranges:
        inverted, found = self._take("^"), _Ranges()
        while not self._take("]"):
            low = self._member(start)
            if self._next() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member(start)
                if not (_single(low) and _single(high)) or high < low:
                    raise PatternError(f"the range that ends at {self._at} begins after its end")
                found.append((low[0][0], high[0][1]))
            else:
                found += low
        return _inverted(found) if inverted else found

    def _member(self, start: int) -> _Ranges:
        character = self._next()
        if not character:
            raise PatternError(f"the bracket at {start} is not closed")
        self._at += 1
        if character != "\\":
            return [(ord(character), ord(character))]
        if self._take("b"):
            return [(8, 8)]
        return self._escape()

    def _escape(self) -> _Ranges:
        """The characters of an escape, after its backslash."""
        start, character = self._at, self._next()
        self._at += 1
        if not character:
            raise PatternError("it ends with a backslash")
        if character.lower() in _CLASSES:
            found = _CLASSES[character.lower()]
            return found if character.islower() else _inverted(found)
        if character in _CONTROLS and not (character == "0" and self._next().isdecimal()):
            code = _CONTROLS[character]
        elif character in "xu":
            code = self._code(2 if character == "x" else 4, start)
        elif character.isalnum():
            raise PatternError(f"the escape \\{character} at {start}", only_unsupported=True)
        else:
            code = ord(character)
        return [(code, code)]

    def _code(self, length: int, start: int) -> int:
        if self._take("{"):
            length = max(0, self._pattern.find("}", self._at) - self._at)
        number = self._pattern[self._at : self._at + length]
        self._at += length
        self._take("}")
        try:
            code = int(number, 16)
        except ValueError:
            code = _LAST + 1
        if code > _LAST:
            raise PatternError(f"the number of a character at {start} is wrong")
        if 0xD800 <= code <= 0xDFFF:
            raise PatternError(f"half of a surrogate pair at {start}", only_unsupported=True)
        return code


def _single(ranges: _Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _repeated(unit: str, low: int, high: float) -> _Part:
    return _Part(counted(unit, low, high), low, high, unit)


def counted(item: str, low: int, high: float, rule: Callable[[str], str] = "({})".format) -> str:
    """The expression for `low` to `high` items, which may be infinite; `rule` names an expression, or brackets it.

    With `"a"{0,1000}` each token takes xgrammar 40 times as long as with `"a"{0,128}`, and all sequences wait for it.
    So large counts are made of blocks: `("a"{64}){0,14} "a"{0,104}`.
    """
    if (low if high == math.inf else high) <= _WRITTEN_OUT:
        return f"{item}{_count(low, high)}"
    if high == math.inf:
        return f"{counted(item, low, low, rule)} {item}*"
    if 0 < low < high:
        return f"{counted(item, low, low, rule)} {counted(item, 0, high - low, rule)}"
    blocks, rest = divmod(int(high), _BLOCK)
    block = rule(f"{item}{{{_BLOCK}}}")
    if low:
        return f"{counted(block, blocks, blocks, rule)} {item}{_count(rest, rest)}"
    return f"{counted(block, 0, blocks - 1, rule)} {item}{_count(0, _BLOCK + rest)}"


def _count(low: int, high: float) -> str:
    if high == math.inf:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low},{int(high)}}}"


def _inverted(ranges: _Ranges) -> _Ranges:
    found, begin = _Ranges(), 0
    for low, high in sorted(ranges):
        if low > begin:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*found, (begin, _LAST)] if begin <= _LAST else found


def _one_of(ranges: _Ranges) -> _Part:
    """An expression for one of these characters, as a JSON string has it."""
    return _characters(tuple(ranges))


@lru_cache(1024)
def _characters(ranges: tuple[tuple[int, int], ...]) -> _Part:
    """The inside of a character class for the characters that it can have, and the other characters, each as a string.

    xgrammar 0.1.25 has no ranges beyond ASCII: either all those characters are allowed, or a few, or none.
    """
    plain = [(max(low, first), min(high, last)) for low, high in ranges for first, last in _PLAIN]
    plain = [(low, high) for low, high in plain if low <= high]
    beyond = [(max(low, _ASCII + 1), high) for low, high in ranges if high > _ASCII]
    if _inverted([(0, _ASCII), *beyond]) == []:
        without = _inverted([*plain, (_ASCII + 1, _LAST)])
        parts = [f"[^{''.join(map(_shown, without))}]"]
    else:
        parts = [f"[{''.join(map(_shown, plain))}]"] if plain else []
        if sum(high - low + 1 for low, high in beyond) <= _MOST_BEYOND:
            parts += [f'"{chr(code)}"' for low, high in beyond for code in range(low, high + 1)]
    parts += [literal(text) for character, text in _ESCAPES.items() if _has(ranges, ord(character))]
    if not parts:
        raise PatternError("no character of one of its classes can be in a grammar", only_unsupported=True)
    text = parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"
    return _Part(text, 1, 1, text)


def _has(ranges: Iterable[tuple[int, int]], code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _shown(each: tuple[int, int]) -> str:
    low, high = map(_character, each)
    return low if low == high else f"{low}-{high}"


def _character(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
