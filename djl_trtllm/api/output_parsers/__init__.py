"""Tool calls and reasoning in generated text, found while it arrives.

How models write them are rows of `formats.toml`. `reader` reads text and values that are still arriving, `calls` finds
calls in any of the formats, `reasoning` separates reasoning.
"""

import functools
from collections.abc import Mapping
from typing import Any

from djl_trtllm.api.output_parsers.calls import CallParser
from djl_trtllm.api.output_parsers.formats import REASONING, REQUIRED, TOOLS, ToolFormat
from djl_trtllm.api.output_parsers.reader import (
    CallArguments,
    CallStart,
    Content,
    Event,
    NamedParser,
    OutputParser,
    PlainParser,
    Reasoning,
)
from djl_trtllm.api.output_parsers.reasoning import ChannelParser, ReasoningParser
from djl_trtllm.request import ThinkingBudget, begins_with_reasoning

__all__ = [
    "REQUIRED",
    "TOOLS",
    "CallArguments",
    "CallStart",
    "Content",
    "Event",
    "NamedParser",
    "OutputParser",
    "PlainParser",
    "Reasoning",
    "ToolFormat",
    "call_parser",
    "reasoning_format",
    "reasoning_markers",
    "thinking_budget",
    "tool_format",
    "with_reasoning",
]

_LONGEST_END = 200
"""Characters at the end of a prompt in which its last marker is looked for."""


def call_parser(own: ToolFormat, tools: Mapping[str, Any]) -> OutputParser:
    """A parser of calls in this format; `tools` are the schemas of the functions' parameters by name."""
    return ChannelParser(tools, reasoning=False) if own.channels else CallParser(own, tools)


def with_reasoning(setting: str, answer: OutputParser, prompt: str) -> OutputParser:
    """A parser of one output after this prompt: reasoning in this format, and the answer, which `answer` parses."""
    own = REASONING.get(setting)
    if own is None:
        return answer
    if own.channels:
        tools = answer.tools if isinstance(answer, (CallParser, ChannelParser)) else None
        return ChannelParser(tools, reasoning=True)
    thinking = begins_with_reasoning(prompt[-_LONGEST_END:], own.open, own.close, starts=own.starts)
    return ReasoningParser(own, answer, thinking=thinking)


def thinking_budget(setting: str, tokens: int, tools: ToolFormat | None) -> ThinkingBudget | None:
    """The budget of reasoning in this format, None for a format without it, or without one text that ends it."""
    own = REASONING.get(setting)
    if own is None or own.channels:
        return None
    calls = tools.openers.texts if own.ends_at_call and tools is not None else ()
    return ThinkingBudget(tokens, own.open, (own.close, *calls), own.starts, own.anywhere)


def reasoning_markers(setting: str) -> tuple[str, ...]:
    """The markers around reasoning."""
    return REASONING[setting].markers if setting in REASONING else ()


def tool_format(setting: str, template: str) -> ToolFormat | None:
    """The format that the option sets, or that the template asks for. None if it asks for none that is known."""
    if setting == "none":
        return ToolFormat()
    return _recognise_tools(template) if setting == "auto" else TOOLS[setting]


def reasoning_format(setting: str, template: str) -> str:
    """The format that the option sets, or that the template knows."""
    return _recognise_reasoning(template) if setting == "auto" else setting


@functools.lru_cache(64)
def _recognise_tools(template: str) -> ToolFormat | None:
    rows = (row for row in TOOLS.values() if any(all(text in template for text in texts) for texts in row.template))
    return next(rows, None)


@functools.lru_cache(64)
def _recognise_reasoning(template: str) -> str:
    # Whether the output begins with reasoning is seen at the prompt.
    rows = (name for name, row in REASONING.items() if row.template and row.template in template)
    return next(rows, "none")
