"""The tables of OpenAI's parameters, with the sampling parameters that vLLM and LMI add to them.

Source: OpenAI's API reference of 2026 (`create chat completion`, `create completion`).
"""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.messages import MESSAGES
from djl_trtllm.api.openai.tool_parameters import TOOLS
from djl_trtllm.api.parameters import BOOLEAN, IGNORED, OBJECT, TEXT, Kind, Parameter, Table, integer, number
from djl_trtllm.api.sampling import ADAPTER, MOST_TOKENS, NOT_HONOURED, SAMPLING

_NO_MEANING = tuple(
    Parameter((name,), target=IGNORED)
    for name in (
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    )
)
"""Fields for OpenAI's own service. They change nothing about the answer of a model that has no such settings."""

_COMMON = (
    Parameter(("model",), TEXT, IGNORED),
    Parameter(("temperature",), number(0, 2), "temperature"),
    Parameter(("stream",), BOOLEAN, "stream"),
    Parameter(("stream_options",), OBJECT, "stream_options"),
)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = Kind(
    "a text, a list of token ids, or a list of up to 64 of either",
    lambda value: value,
    {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1, "maxItems": 64}]},
)


def _read_modalities(value: Any) -> None:
    if value != ["text"]:
        raise ValueError("")


CHAT_FIELDS = Table(
    SAMPLING,
    ADAPTER,
    NOT_HONOURED,
    _COMMON,
    _NO_MEANING,
    (
        Parameter(("messages",), MESSAGES, IGNORED),
        Parameter(("max_completion_tokens", "max_tokens"), integer(1, MOST_TOKENS), "max_new_tokens"),
        Parameter(("logprobs",), BOOLEAN, "logprobs"),
        Parameter(("top_logprobs",), integer(0, 20), "top_logprobs"),
        Parameter(("add_generation_prompt",), BOOLEAN, "add_generation_prompt"),
        Parameter(("chat_template_kwargs",), OBJECT, "chat_template_kwargs"),
        Parameter(("continue_final_message",), neutral=(False,)),
        Parameter(("modalities",), Kind('["text"]', _read_modalities, {"const": ["text"]}), "modalities"),
        Parameter(("audio",), advice="this server generates text"),
        Parameter(("web_search_options",), advice="this server does not search"),
        *TOOLS,
        Parameter(("functions",), neutral=([],), advice="use 'tools'"),
        Parameter(("function_call",), neutral=("none", "auto"), advice="use 'tool_choice'"),
    ),
    elsewhere={"prompt": "to /v1/completions", "inputs": "to /invocations, here it is 'messages'"},
    required=("messages",),
)
"""The body of `/v1/chat/completions`."""

COMPLETION_FIELDS = Table(
    SAMPLING,
    ADAPTER,
    NOT_HONOURED,
    _COMMON,
    _NO_MEANING,
    (
        Parameter(("prompt",), _PROMPT, IGNORED),
        Parameter(("max_tokens", "max_completion_tokens"), integer(1, MOST_TOKENS), "max_new_tokens"),
        Parameter(("logprobs",), integer(0, 5), "logprobs"),
        Parameter(("echo",), BOOLEAN, "echo"),
        Parameter(("suffix",), neutral=("",), advice="models are given a prompt, not a text with a gap"),
        Parameter(("add_special_tokens",), neutral=(True,)),
        Parameter(("parallel_tool_calls",), target=IGNORED),
    ),
    elsewhere={"messages": "to /v1/chat/completions", "inputs": "to /invocations, here it is 'prompt'"},
    required=("prompt",),
)
"""The body of `/v1/completions`."""

STREAM_OPTIONS = Table(
    (
        Parameter(("include_usage",), BOOLEAN, "include_usage"),
        # vLLM's: what load generators ask for.
        Parameter(("continuous_usage_stats",), BOOLEAN, "continuous_usage"),
        # OpenAI pads its events against eavesdroppers that see their lengths.
        Parameter(("include_obfuscation",), target=IGNORED),
    )
)
"""The members of `stream_options`."""

TOKENIZE_FIELDS = Table(
    (
        Parameter(("model",), TEXT, IGNORED),
        Parameter(("prompt",), TEXT, "prompt"),
        Parameter(("messages",), MESSAGES, IGNORED),
        Parameter(("add_special_tokens",), BOOLEAN, "add_special_tokens"),
        Parameter(("add_generation_prompt",), BOOLEAN, "add_generation_prompt"),
        Parameter(("return_token_strs",), BOOLEAN, "return_token_strs"),
        Parameter(("chat_template_kwargs",), OBJECT, "chat_template_kwargs"),
        TOOLS[0],
    )
)
"""The body of `/tokenize`."""

DETOKENIZE_FIELDS = Table(
    (
        Parameter(("model",), TEXT, IGNORED),
        Parameter(("tokens",), Kind("a list of token ids", lambda value: value, _IDS | {"minItems": 0}), IGNORED),
    ),
    required=("tokens",),
)
"""The body of `/detokenize`."""
