"""Find tool calls and reasoning in generated text, while it arrives.

A parser is a state machine over pieces of text. How a text is cut into pieces does not change what the parser finds.
Text that is not what it looked like is content: parsers do not raise, and only markup is left out.
"""

from djl_trtllm.api.output_parsers.base import Content, Event, OutputParser, PlainParser, Reasoning
from djl_trtllm.api.output_parsers.forced import NamedParser, RequiredParser
from djl_trtllm.api.output_parsers.formats import (
    THINK_MARKERS,
    ToolFormat,
    closes_reasoning,
    opens_reasoning,
    reasoning_format,
    tool_format,
)
from djl_trtllm.api.output_parsers.json_call import CallArguments, CallStart
from djl_trtllm.api.output_parsers.reasoning import ReasoningParser

__all__ = [
    "THINK_MARKERS",
    "CallArguments",
    "CallStart",
    "Content",
    "Event",
    "NamedParser",
    "OutputParser",
    "PlainParser",
    "Reasoning",
    "ReasoningParser",
    "RequiredParser",
    "ToolFormat",
    "closes_reasoning",
    "opens_reasoning",
    "reasoning_format",
    "tool_format",
]
