"""The formats of tool calls and reasoning: the rows of `formats.toml`."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from djl_trtllm.api.output_parsers.reader import Markers, markers
from djl_trtllm.api.output_parsers.usual import UsualCall
from djl_trtllm.config import ReasoningFormat, ToolCallFormat
from djl_trtllm.config.tables import read_table

_VARYING = re.compile(r"\$(object|json|parameters|elements|literal|name|key|text|value)")
_NAME = re.compile(r"[\w.-]{1,256}")
_NO_NAME = "[]{}\"',<"


def _lines(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("\n")))


@dataclass(frozen=True, slots=True)
class Parameter:
    """How a parameter is written: `opener`, the key, `inner` markers, the value, `closer`."""

    opener: str
    inner: tuple[str, ...]
    text_end: str
    """What stands after the word that says whether the value is text; "" if there is no such word."""
    closer: str
    on_lines: bool
    """The value stands on lines of its own."""

    @classmethod
    def read(cls, text: str) -> Parameter:
        opener, _, inner, *rest = _VARYING.split(text)
        text_end = rest[1] if rest[0] == "text" else ""
        return cls(opener, _lines(inner), text_end, rest[-1].strip("\n"), inner.endswith("\n"))


@dataclass(frozen=True, slots=True)
class Call:
    """How a call is written: `opener`, the name, `middle`, the arguments as `body`, `closers`."""

    opener: str
    middle: str
    body: str
    closers: tuple[str, ...]
    listed: bool
    name_ends: Markers | None
    """What may stand after the name; None if the name is in the body."""

    @classmethod
    def read(cls, text: str, parameter: Parameter | None) -> Call:
        opener, first, *rest = _VARYING.split(text)
        listed = opener == "["
        after = rest[-1].removesuffix("]") if listed else rest[-1]
        middle = rest[0] if first == "name" else ""
        ends = [middle or (parameter.opener if parameter else "{"), *(() if middle else _lines(after))]
        if listed:
            ends += _NO_NAME
        names = Markers(*ends) if first == "name" else None
        return cls(opener, middle, rest[1] if first == "name" else first, _lines(after), listed, names)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A row of `tools`. `markers` are shown where they are special tokens."""

    call: Sequence[Call] = ()
    parameter: Parameter | None = None
    name: re.Pattern[str] = _NAME
    section: str = ""
    close: str = ""
    between: str = ""
    bare: bool = False
    alone: bool = False
    forced: bool = False
    channels: bool = False
    quotes: Sequence[str] = ()
    markers: tuple[str, ...] = ()
    template: Sequence[Sequence[str]] = ()
    id: str = ""
    _usual: dict[str, UsualCall] = field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, row: dict[str, Any]) -> ToolFormat:
        parameter = Parameter.read(row["parameter"]) if "parameter" in row else None
        texts = [row["call"]] if isinstance(row.get("call"), str) else row.get("call", ())
        marks = row.get("markers") or filter(None, (row.get("section"), row.get("close")))
        own = {
            "call": [Call.read(text, parameter) for text in texts],
            "parameter": parameter,
            "name": re.compile(row.get("name", _NAME)),
            "markers": CHANNEL_MARKERS if row.get("channels") else tuple(marks),
        }
        return cls(**row | own)

    @property
    def openers(self) -> Markers:
        """What calls begin with: their section, or themselves."""
        own = () if self.section and not self.bare else (call.opener for call in self.call)
        return markers(*filter(None, (self.section, *own)))

    def usual(self, call: Call) -> UsualCall:
        """The usual form of a call behind another one."""
        kind = f"{call.opener}${call.body}"
        if kind not in self._usual:
            self._usual[kind] = UsualCall(call, self)
        return self._usual[kind]

    def new_id(self) -> str:
        """The id of a call."""
        if self.id.isdigit():
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(int(self.id)))
        return f"call_{secrets.token_hex(12)}"

    def fit_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        """The id of a conversation's call `index`, of the function `name`, as the template takes it.

        The end of an id has most of its randomness.
        """
        if self.id.isdigit():
            return call_id[-int(self.id) :]
        return self.id.format(name=name, index=index) if self.id and name else call_id


@dataclass(frozen=True, slots=True)
class Thinking:
    """A row of `reasoning`. `markers` are shown where they are special tokens."""

    open: str = ""
    close: str = ""
    starts: bool = False
    ends_at_call: bool = False
    anywhere: bool = False
    channels: bool = False
    markers: tuple[str, ...] = ()
    template: str = ""

    @classmethod
    def read(cls, row: dict[str, Any]) -> Thinking:
        marks = CHANNEL_MARKERS if row.get("channels") else row.get("markers") or (row["open"], row["close"])
        return cls(**row | {"markers": tuple(marks)})


CHANNEL_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_ROWS = read_table("formats.toml", __package__)
TOOLS = {ToolCallFormat(name): ToolFormat.read(row) for name, row in _ROWS["tools"].items()}
REASONING = {ReasoningFormat(name): Thinking.read(row) for name, row in _ROWS["reasoning"].items()}
REQUIRED = ToolFormat.read(_ROWS["required"])
"""Calls of a request that has to make one."""
