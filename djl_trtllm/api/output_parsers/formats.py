"""Which formats there are, and which one a chat template asks for."""

from __future__ import annotations

import functools
import secrets
import string
from collections.abc import Callable, Set
from typing import NamedTuple

from djl_trtllm.api.output_parsers import hermes, llama3_json, mistral, reasoning
from djl_trtllm.api.output_parsers.base import OutputParser, PlainParser
from djl_trtllm.config import ReasoningFormat, ToolCallFormat

THINK_MARKERS = (reasoning.OPEN, reasoning.CLOSE)
_MISTRAL_ID = 9
"""Characters: Mistral's templates refuse ids of another length."""


class ToolFormat(NamedTuple):
    """`parser` makes one for a request with these functions. `markers` are shown where they are special tokens.

    `id_length` is the length of a call's id where the template wants a certain one.
    """

    parser: Callable[[Set[str]], OutputParser]
    markers: tuple[str, ...] = ()
    id_length: int | None = None

    def new_id(self) -> str:
        """The id of a call."""
        if self.id_length is not None:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return f"call_{secrets.token_hex(12)}"

    def fit_id(self, call_id: str) -> str:
        """The id of a call as the template takes it. The end of an id has most of its randomness."""
        return call_id if self.id_length is None else call_id[-self.id_length :]


_FORMATS = {
    ToolCallFormat.HERMES: ToolFormat(lambda names: hermes.HermesParser(), (hermes.OPEN, hermes.CLOSE)),
    ToolCallFormat.LLAMA3_JSON: ToolFormat(llama3_json.Llama3JsonParser, (llama3_json.TAG,)),
    ToolCallFormat.MISTRAL: ToolFormat(lambda names: mistral.MistralParser(), mistral.MARKERS, _MISTRAL_ID),
    ToolCallFormat.NONE: ToolFormat(lambda names: PlainParser()),
}


def tool_format(setting: ToolCallFormat, template: str) -> ToolFormat | None:
    """The format that the option sets, or that the template asks for. None if it asks for none that is known."""
    return _FORMATS.get(_recognise_tools(template) if setting is ToolCallFormat.AUTO else setting)


def reasoning_format(setting: ReasoningFormat, template: str) -> ReasoningFormat:
    """The format that the option sets, or that the template knows."""
    return _recognise_reasoning(template) if setting is ReasoningFormat.AUTO else setting


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends in an open `<think>`, so that the output begins with reasoning."""
    return prompt[-200:].rstrip().endswith(reasoning.OPEN)


def closes_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with the reasoning, so that the output has none."""
    return prompt[-200:].rstrip().endswith(reasoning.CLOSE)


@functools.lru_cache(64)
def _recognise_tools(template: str) -> ToolCallFormat:
    """AUTO if the template asks for no known format."""
    if "[TOOL_CALLS]" in template:
        return ToolCallFormat.MISTRAL
    # Qwen3 Coder and GLM write XML between the same tags.
    if hermes.OPEN in template and "<function=" not in template and "<arg_key>" not in template:
        return ToolCallFormat.HERMES
    if llama3_json.TAG in template or '"parameters": dictionary of' in template:
        return ToolCallFormat.LLAMA3_JSON
    return ToolCallFormat.AUTO


@functools.lru_cache(64)
def _recognise_reasoning(template: str) -> ReasoningFormat:
    # Whether the output begins with reasoning is seen at the prompt.
    return ReasoningFormat.QWEN3 if reasoning.CLOSE in template else ReasoningFormat.NONE
