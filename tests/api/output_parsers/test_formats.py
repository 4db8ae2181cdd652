from __future__ import annotations

import pytest

from djl_trtllm.api.output_parsers.formats import (
    closes_reasoning,
    opens_reasoning,
    reasoning_format,
    tool_format,
)
from djl_trtllm.api.output_parsers.hermes import HermesParser
from djl_trtllm.api.output_parsers.llama3_json import Llama3JsonParser
from djl_trtllm.api.output_parsers.mistral import MistralParser
from djl_trtllm.config import ReasoningFormat, ToolCallFormat

QWEN = "{%- if tools %}<tool_call>\n{\"name\": <function-name>}{% endif %}{{ content.split('</think>') }}"
LLAMA_31 = "{{- '<|python_tag|>' + tool_call.name }}"
LLAMA_32 = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name'}}"""
MISTRAL = '{{- "[TOOL_CALLS] [" }}'


@pytest.mark.parametrize(
    ("template", "parser"),
    [(QWEN, HermesParser), (LLAMA_31, Llama3JsonParser), (LLAMA_32, Llama3JsonParser), (MISTRAL, MistralParser)],
)
def test_the_template_tells_how_calls_are_written(template: str, parser: type) -> None:
    recognised = tool_format(ToolCallFormat.AUTO, template)
    assert recognised is not None
    assert isinstance(recognised.parser({"f"}), parser)


@pytest.mark.parametrize("template", ["", "{{ tools }}", "<tool_call><function=f>", "<tool_call>f<arg_key>"])
def test_other_formats_are_not_taken_for_a_known_one(template: str) -> None:
    assert tool_format(ToolCallFormat.AUTO, template) is None


def test_the_option_comes_before_the_template() -> None:
    chosen = tool_format(ToolCallFormat.HERMES, MISTRAL)
    assert chosen is not None and isinstance(chosen.parser(set()), HermesParser)
    assert "<tool_call>" in chosen.markers
    nothing = tool_format(ToolCallFormat.NONE, MISTRAL)
    assert nothing is not None and nothing.markers == () and nothing.parser(set()).feed("[TOOL_CALLS]")
    assert reasoning_format(ReasoningFormat.NONE, QWEN) is ReasoningFormat.NONE
    assert reasoning_format(ReasoningFormat.AUTO, QWEN) is ReasoningFormat.QWEN3
    assert reasoning_format(ReasoningFormat.AUTO, MISTRAL) is ReasoningFormat.NONE


def test_ids_are_as_the_template_takes_them() -> None:
    hermes, mistral = (tool_format(ToolCallFormat(name), "") for name in ("hermes", "mistral"))
    assert hermes is not None and mistral is not None
    assert hermes.new_id().startswith("call_") and hermes.new_id() != hermes.new_id()
    assert len(mistral.new_id()) == 9 and mistral.new_id().isalnum()
    assert (hermes.fit_id("call_0123456789"), mistral.fit_id("call_0123456789")) == ("call_0123456789", "123456789")


def test_the_prompt_tells_whether_the_output_begins_with_reasoning() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n") and not opens_reasoning("<think> a")
    assert closes_reasoning("<think>\n\n</think>\n\n") and not closes_reasoning("<think>\n")
