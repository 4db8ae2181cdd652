"""Calls in their usual form that stand one after the other: one match reads each.

Models write call after call in one way, most of them without nested values. `calls` reads any form in steps, which
take ten times as long; what does not match here is read there. No match goes beyond the call that is read in steps, so
that it costs no more than that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from djl_trtllm.api.output_parsers.reader import PYTHON_QUOTES, as_json, quoted, unescaped, word

if TYPE_CHECKING:
    from djl_trtllm.api.output_parsers.formats import Call, Parameter, ToolFormat

_B = r"[ \t\r\n]{0,64}(?![ \t\r\n])"
"""All blanks up to what comes next, at most 64: in one way, so that blanks beside each other cost no more."""
_FLAT = r'\{[^"{}\[\]<]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"{}\[\]<]*)*\}'
"""A JSON object without others in it."""
_OBJECT = rf'\{{{_B}"name"{_B}:{_B}"([A-Za-z0-9_.-]+)"{_B},{_B}"(?:arguments|parameters)"{_B}:{_B}({_FLAT}){_B}\}}'
_KEY = r"([\w.-]{1,256})"
_WORD = r"""[^\s,:={}\[\]()"'<]{1,256}"""

TypesOf = Callable[[str, str], frozenset[str]]


class UsualCall:
    """A call of a format behind another one of its kind, from what stands between them on."""

    def __init__(self, call: Call, own: ToolFormat) -> None:
        self._parameter, self._escaped = own.parameter, own.quotes and own.quotes[0] in PYTHON_QUOTES
        self._item: re.Pattern[str] | None = None
        body = _FLAT
        if call.body in ("parameters", "elements") and own.parameter is not None:
            item = _written(own.parameter, named=call.body == "elements")
            self._item, body = re.compile(item, re.DOTALL), f"(?:{_B}{_without_groups(item)})*"
        elif call.body == "literal":
            item = rf"{_KEY}{_B}[:=]{_B}(?:{'|'.join(map(_string, own.quotes))}|({_WORD}))"
            bare = _without_groups(item)
            self._item, body = re.compile(item), f"(?:{_B}{bare}(?:{_B},{_B}{bare})*)?"
        self._name = 2 if own.name.groups and call.name_ends is not None else 1
        self._body = self._name + 1
        name = f"({own.name.pattern}){_B}{re.escape(call.middle)}{_B}({body})"
        ends = "".join(_B + re.escape(closer) for closer in call.closers)
        pattern = f"{_between(call, own)}{_B}{_OBJECT if call.name_ends is None else name}{ends}"
        self._pattern = re.compile(pattern, re.DOTALL)

    def read(self, text: str, at: int, types_of: TypesOf) -> tuple[str, str, int] | None:
        """The name, the arguments and the end of a call whose usual form stands at a place."""
        found = self._pattern.match(text, at)
        if found is None:
            return None
        name, body = found[self._name], found[self._body]
        if self._item is not None:
            pairs = [self._pair(name, item, types_of) for item in self._item.findall(body)]
            if None in pairs:
                return None
            body = f"{{{', '.join(filter(None, pairs))}}}"
        return name, body, found.end()

    def _pair(self, name: str, item: tuple[str, ...], types_of: TypesOf) -> str | None:
        """A key and a value as JSON; None where they have to be read in steps."""
        key, *rest = item
        if self._parameter is None:
            *strings, bare = rest
            text = "".join(strings)
            shown = word(bare) if bare else f'"{unescaped(text)}"' if self._escaped else quoted(text)
            return f"{quoted(key)}: {shown}"
        if self._parameter.text_end:
            is_text, value = rest
            return f"{quoted(key)}: {quoted(value) if is_text == 'true' else as_json(value, frozenset())}"
        value, *closed = rest
        if closed and (closed != [key] or value.isspace()):
            return None
        types = types_of(name, key)
        return f"{quoted(key)}: {quoted(value) if types == {'string'} else as_json(value, types)}"


def _between(call: Call, own: ToolFormat) -> str:
    """What may stand between two calls."""
    if call.listed:
        return f"{_B},"
    section = f"{_B}{re.escape(own.section)}" if own.section else ""
    if section and own.close:
        section = f"(?:{_B}{re.escape(own.close)})?{section}"
    if call.opener:
        return (f"(?:{section})?" if section else "") + _B + re.escape(call.opener)
    return f"(?:{_B}{re.escape(own.between)})?" if own.between else section


def _written(parameter: Parameter, *, named: bool) -> str:
    """A parameter, with groups for key, word (whether the value is text), value, and if `named` the key at its end."""
    end, line = parameter.closer, r"\n?" if parameter.on_lines else ""
    key_end, *inner = map(re.escape, parameter.inner)
    text = rf"(true|false){re.escape(parameter.text_end)}" if parameter.text_end else ""
    markers = "".join(_B + marker for marker in inner)
    value = f"{line}([^{re.escape(end[0])}]*?){line}{re.escape(end)}" + (f"{_KEY}>" if named else "")
    return f"{re.escape(parameter.opener)}{_KEY}{key_end}{text}{markers}{value}"


def _string(quote: str) -> str:
    """A string, without the escape sequences that may have too few digits."""
    end, first = re.escape(quote), re.escape(quote[0])
    if quote in PYTHON_QUOTES:
        return rf"{end}([^{first}\\]*(?:\\[^xuU][^{first}\\]*)*){end}"
    return f"{end}([^{first}]*){end}"


def _without_groups(pattern: str) -> str:
    return re.sub(r"(?<!\\)\((?!\?)", "(?:", pattern)
