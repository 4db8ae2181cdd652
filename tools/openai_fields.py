"""Writes `docs/openai-fields.md`: each field of OpenAI's requests, what becomes of it here, and what engines refuse.

The fields are those of the installed `openai` package's types, and the parser says what becomes of a request with one:
`.venv-clients/bin/python -m tools.openai_fields`, which has the newest (`scripts/test-clients`; the lock's is older). A
field without an example here is an error.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

import djl_trtllm.backends.openvino.executor as openvino
import djl_trtllm.backends.vllm.executor as vllm
from djl_trtllm.api.base import RawRequest
from djl_trtllm.api.dialects.lmi.dialect import Body
from djl_trtllm.api.dialects.openai.dialect import CHAT_FIELDS, COMPLETION_FIELDS, parameters
from djl_trtllm.api.kept import Kept
from djl_trtllm.api.parameters import IGNORED, Table
from djl_trtllm.api.registry import BODIES
from djl_trtllm.backends.tensorrt_llm.executor import features_of
from djl_trtllm.backends.tensorrt_llm.names import has
from djl_trtllm.backends.tensorrt_llm.sampling import find_sampler
from djl_trtllm.batching.admission import refusals
from djl_trtllm.config import Options, Task
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.executor.protocol import GUIDES, Feature, Limits

PAGE = Path(__file__).parents[1] / "docs" / "openai-fields.md"
_LOGPROBS = "message.output_text.logprobs"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
EXAMPLES: dict[str, Any] = {
    **{"audio": {"voice": "alloy", "format": "mp3"}, "best_of": 2, "echo": True, "frequency_penalty": 0.5},
    **{"function_call": {"name": "f"}, "functions": [{"name": "f"}], "logit_bias": {"5": -100}, "logprobs": True},
    **{"max_completion_tokens": 5, "max_tokens": 5, "metadata": {"a": "b"}, "modalities": ["text"], "n": 2},
    **{"messages": [{"role": "user", "content": "Hi"}], "model": "", "moderation": {"model": "omni"}},
    **{"parallel_tool_calls": False, "prediction": {"type": "content", "content": "a"}, "presence_penalty": 0.5},
    **{"prompt": "Hi", "prompt_cache_key": "a", "prompt_cache_options": {}, "prompt_cache_retention": "24h"},
    **{"reasoning_effort": "low", "response_format": {"type": "json_object"}, "safety_identifier": "a", "seed": 5},
    **{"service_tier": "flex", "stop": ["."], "store": True, "stream": True, "stream_options": {"include_usage": True}},
    **{"suffix": "a", "temperature": 0.5, "tool_choice": "none", "tools": [_TOOL], "top_logprobs": 2, "top_p": 0.5},
    **{"user": "a", "verbosity": "low", "web_search_options": {}},
}
"""A value of each field that asks for something."""
_FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
_OF: dict[str, dict[str, Any]] = {
    "prompt": {"logprobs": 2},
    "input": {
        **{"access_programs": {"cyber": "standard"}, "background": True, "background_options": {}, "image": {}},
        **{"context_management": [{"type": "compaction"}], "conversation": "a", "include": [_LOGPROBS], "input": "Hi"},
        **{"instructions": "Hi", "max_output_tokens": 5, "max_tool_calls": 5, "previous_response_id": "resp_0"},
        **{"prompt": {"id": "a"}, "reasoning": {"effort": "low"}, "stream_options": {"include_obfuscation": False}},
        **{"text": {"format": {"type": "json_object"}}, "tools": [_FUNCTION], "truncation": "auto"},
    },
}
"""Values of fields that differ in the body with this member."""
_NEEDS_OF_RESPONSES: dict[str, dict[str, Any]] = {
    "top_logprobs": {"include": [_LOGPROBS]},
    **{name: {"tools": [_FUNCTION]} for name in ("parallel_tool_calls", "tool_choice")},
}
_NEEDS: dict[str, dict[str, Any]] = {
    **{"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}},
    **{name: {"tools": [_TOOL]} for name in ("parallel_tool_calls", "tool_choice")},
}
"""What a field needs beside it."""


_LIMITS = Limits(1, 0, 32, 4096)


def _tensorrt_llm(version: str, backend: str, max_beam_width: int = 1) -> frozenset[str]:
    sampler = find_sampler(version, backend, {}, max_beam_width)
    apart = has("generate_async", "cache_salt", version)
    return features_of(version, backend, sampler, library="xgrammar", logprobs=True, lora=True, apart=apart)


ENGINES: dict[str, frozenset[str]] = {
    "OpenVINO": openvino.FEATURES | openvino.GUIDES | openvino.SCORES,
    "vLLM": vllm.FEATURES | GUIDES | {Feature.ADAPTERS},
    "TensorRT-LLM 1.0": _tensorrt_llm("1.0.0", "pytorch"),
    "TensorRT-LLM 1.2": _tensorrt_llm("1.2.0", "pytorch"),
    "compiled TensorRT engines": _tensorrt_llm("1.2.0", "tensorrt", max_beam_width=4),
}
"""What each engine honours, at most."""


@dataclass
class Tokenizer:
    """As much of a tokenizer as the parser reads."""

    vocab_size = 100

    def chat_source(self, tools: bool) -> str:
        """A chat template that has tools, reasoning, and the keyword of its effort."""
        return "{{ messages }}{{ tools }}{{ reasoning_effort }}<tool_call></think>"


@dataclass
class Model:
    """A model of any engine, with the default options."""

    options: Options = field(default_factory=Options)
    name: str = "model"
    max_seq_len: int = 4096
    tokenizer: Any = field(default_factory=Tokenizer)
    custom: None = None
    kept: Kept = field(default_factory=lambda: Kept(Options()))

    def __post_init__(self) -> None:
        self.kept.keep("", "resp_0", (b"{}", b"[]", b"[]", b""))


class Row(NamedTuple):
    """What becomes of a request with one field."""

    name: str
    example: str
    outcome: str


APIS: tuple[tuple[str, str, type, type], ...] = (
    ("Chat", "messages", chat.CompletionCreateParamsNonStreaming, chat.CompletionCreateParamsStreaming),
    (
        "Completions",
        "prompt",
        completions.CompletionCreateParamsNonStreaming,
        completions.CompletionCreateParamsStreaming,
    ),
    ("Responses", "input", responses.ResponseCreateParamsNonStreaming, responses.ResponseCreateParamsStreaming),
)


def rows(member: str, types: tuple[type, ...]) -> list[Row]:
    """A row for each field of the body that has this member."""
    (body,) = (each for each in BODIES if each.member == member and not each.mark and each.task is Task.GENERATE)
    assert body.dialect is not None
    (table,) = body.dialect.tables[body.path]
    assert isinstance(table, Table)
    names = sorted({name for each in types for name in get_type_hints(each)})
    return [_row(name, body, table) for name in names]


def _row(name: str, body: Body, table: Table) -> Row:
    assert body.dialect is not None
    examples = EXAMPLES | _OF.get(body.member, {})
    value = examples[name]
    needs = (_NEEDS_OF_RESPONSES if body.member == "input" else _NEEDS).get(name, {})
    fields = {body.member: examples[body.member], **needs, name: value}
    example = json.dumps(value)
    try:
        call = body.dialect.parse(RawRequest(json.dumps(fields).encode(), {}, body.path), Model())
    except InvalidRequestError as error:
        if f"'{name}'" not in str(error):
            raise
        return Row(name, example, f"refused by name: {str(error).split(': ')[-1]}")
    if call.headers:
        return Row(name, example, "served with a note: the header `Warning` and the log name it")
    if table.rows[name].kind is None and table.rows[name].target == IGNORED:
        return Row(name, example, "served with a note: the log names it once, it belongs to OpenAI's own service")
    return Row(name, example, "served with effect")


def page() -> str:
    """The document."""
    logging.disable()
    text = (
        "# OpenAI's fields\n\nWhat becomes of a request with each field of OpenAI's schema, one at a time. The fields "
        f"are\nthose of the Python package `openai` {version('openai')}; `python -m tools.openai_fields` writes this "
        "page by\nparsing a request with each. What the engine in use does not honour is refused by name, too.\n"
    )
    for title, member, *types in APIS:
        text += f"\n## {title}\n\n| field | example | what becomes of it |\n|---|---|---|\n"
        text += "".join(f"| `{row.name}` | `{row.example}` | {row.outcome} |\n" for row in rows(member, tuple(types)))
    logging.disable(logging.NOTSET)
    return text + _engines()


def _engines() -> str:
    """What some engine refuses, from the features that their backends declare."""
    refused = {name: parameters(refusals(_LIMITS, features), Model()) for name, features in ENGINES.items()}
    text = (
        "\n## Engines\n\nParameters of chat and completions that an engine refuses by name, with every option that "
        "an engine has\nfor them (guides, adapters, log-probabilities), and without beams on PyTorch, where "
        "`option.max_beam_width`\nis for all requests. On TensorRT-LLM [the sampler](tensorrt-llm.md#requests) "
        "decides, too: this is the\ndefault one. `GET /v1/models` says it of the engine that runs.\n\n"
        f"| parameter | {' | '.join(ENGINES)} |\n|---|{'---|' * len(ENGINES)}\n"
    )
    rows = (*COMPLETION_FIELDS.rows.values(), *CHAT_FIELDS.rows.values())
    for row in {row.names[0]: row for row in rows}.values():
        cells = ["refused" if each.get(row.names[0]) else "yes" for each in refused.values()]
        if row.target is not None and "refused" in cells:
            text += f"| {', '.join(f'`{name}`' for name in row.names)} | {' | '.join(cells)} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
