"""Random requests of all dialects: every parameter, with values that are right and values that are not."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from djl_trtllm.api.dialects import (
    embeddings as embeddings,
    messages as messages,
    rerank as rerank,
    responses as responses,
    tgi as tgi,
    truss as truss,
)
from djl_trtllm.api.dialects.lmi import dialect as lmi
from djl_trtllm.api.dialects.openai import dialect as openai
from djl_trtllm.api.dialects.triton import inference as triton
from djl_trtllm.api.parameters import IGNORED, Parameter, Table
from tests.support.models import PROMPT
from tests.support.vision import data_url, encoded, picture

MOST_TOKENS = 200
"""The most tokens of a sequence; the server that gets the requests has this limit."""

ADAPTER = "french"
"""An adapter that the server has."""

_WORDS = PROMPT.split()
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
_MAYBE_WRONG = 0.1
"""The share of a request's values that are of any type and size."""

_ANYTHING: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 17, 65, 4096, 2**31 - 1, 2**31, 2**63, 2**64, 10**30,
    -0.5, 0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, -1e308,
    "", "x", "5", "true", " ", "\u0000", "🦊", "\ud800", "word " * 300,
    [], [1], [-1], [2**31], ["a"], [""], [None], [[]], ["a"] * 65, list(range(1025)),
    {}, {"type": "json"}, {"type": "regex", "value": "("}, {"a": {"b": []}},
)  # fmt: skip

_VALUES: dict[str, Callable[[random.Random], Any]] = {
    "max_new_tokens": lambda r: r.choice((1, 2, 3, 5, 8, 13, 21, 34, MOST_TOKENS, MOST_TOKENS + 1)),
    "min_new_tokens": lambda r: r.choice((0, 1, 4, 9)),
    "do_sample": lambda r: r.random() < 0.7,
    "temperature": lambda r: r.choice((0, 1e-6, 0.3, 1, 1.0, 1.9, 50)),
    "top_k": lambda r: r.choice((-1, 0, 1, 2, 50, 2**31 - 1)),
    "top_p": lambda r: r.choice((1e-9, 0.1, 0.9, 1)),
    "min_p": lambda r: r.choice((0, 0.05, 1)),
    "repetition_penalty": lambda r: r.choice((1e-6, 0.8, 1, 1.3, 100)),
    "presence_penalty": lambda r: r.choice((-2, 0, 0.5, 2)),
    "frequency_penalty": lambda r: r.choice((-2, 0, 0.5, 2)),
    "no_repeat_ngram_size": lambda r: r.choice((0, 1, 3, 2**31 - 1)),
    "seed": lambda r: r.choice((0, 1, 2**32, 2**63, 2**64 - 1)),
    "n": lambda r: r.choice((1, 1, 2, 3, 16)),
    "best_of": lambda r: r.choice((1, 2, 3, 16)),
    "beam_width": lambda r: r.choice((1, 2, 3, 4, 5, 16, 64)),
    "length_penalty": lambda r: r.choice((-10, -1, 0, 0.6, 1, 10)),
    "early_stopping": lambda r: r.random() < 0.5,
    "beam_search_diversity_rate": lambda r: r.choice((0, 0.5, 10)),
    "stop": lambda r: r.choice((r.choice(_WORDS), r.sample(_WORDS, 3), " red", "e", "nothing of it", ["🦊", " \t"])),
    "stop_token_ids": lambda r: r.choice(([], [r.randrange(4000)], r.sample(range(4000), 5), [2**31 - 1])),
    "bad": lambda r: r.choice(("", [], r.choice(_WORDS), r.sample(_WORDS, 2), ["little red riding", "🦊"])),
    "ignore_eos": lambda r: r.random() < 0.5,
    "truncate": lambda r: r.choice((1, 2, 5, 1000)),
    "thinking_budget": lambda r: r.choice((0, 1, 3, 40, 2**31 - 1)),
    "details": lambda r: r.random() < 0.8,
    "return_full_text": lambda r: r.random() < 0.5,
    "prefill": lambda r: r.random() < 0.5,
    "logprobs": lambda r: r.random() < 0.8,
    "stream_options": lambda r: r.choice(({}, {"include_usage": True}, {"include_usage": 1, "x": None})),
    "adapter": lambda r: r.choice(("", ADAPTER, [ADAPTER], "unheard of", [])),
    "output_formatter": lambda r: r.choice(
        ("json", "jsonlines", "sse", "json_chat", "jsonlines_chat", "sse_chat", "none", "unheard of")
    ),
    "tools": lambda r: r.choice(([], [_TOOL], [_TOOL] * 3)),
    "tool_choice": lambda r: r.choice(("none", "auto", "required", {"type": "function", "function": {"name": "f"}})),
    "choice": lambda r: {"type": r.choice(("auto", "any", "none", "tool")), "name": "f"},
    "thinking_config": lambda r: {
        "type": r.choice(("enabled", "adaptive", "disabled")),
        "display": r.choice(("omitted", None)),
        "budget_tokens": r.choice((0, 1, 1024, None)),
    },
    "output_config": lambda r: r.choice(
        ({}, {"effort": "low"}, {"format": {"type": "json_schema", "schema": _SCHEMA}})
    ),
    "instructions": lambda r: r.choice(("", "You are a poet.", PROMPT)),
    "previous": lambda r: r.choice(("", "resp_0")),
    "text": lambda r: r.choice(({}, {"format": {"type": r.choice(("text", "json_object"))}, "verbosity": "low"})),
    "reasoning": lambda r: r.choice(({}, {"effort": "low", "summary": "auto"})),
    "include": lambda r: r.sample(("reasoning.encrypted_content", "message.output_text.logprobs"), r.randrange(3)),
    "metadata": lambda r: r.choice(({}, {"a": "b"})),
    "chat_template_kwargs": lambda r: r.choice(({}, {"enable_thinking": False})),
    "modalities": lambda r: ["text"],
    "top_logprobs": lambda r: r.choice((0, 0, 1, 20)),
    "cache_salt": lambda r: r.choice(("a", "b")),
    "enable_thinking": lambda r: r.random() < 0.5,
    "reasoning_effort": lambda r: r.choice(("none", "low", "high")),
    "priority": lambda r: r.choice((0, 1, 5)),
    "prompt_logprobs": lambda r: r.choice((0, 1, 5)),
    "logit_bias": lambda r: r.choice(({}, {str(r.randrange(2000)): r.choice((-100, 1, 100))}, {"99999": 1})),
    "end_id": lambda r: r.choice((-1, 2, r.randrange(2000), 2**31 - 1)),
    "pad_id": lambda r: r.choice((-1, 0, 2)),
    "activate": lambda r: r.random() < 0.5,
    "dimensions": lambda r: r.choice((1, 3, 8, 9, 65_536)),
    "format": lambda r: r.choice(("float", "base64")),
    "truncates": lambda r: r.random() < 0.7,
    "raw": lambda r: r.random() < 0.5,
    "return_documents": lambda r: r.random() < 0.5,
    "top_n": lambda r: r.choice((0, 1, 2, 100)),
    **dict.fromkeys(("documents", "first", "second", "texts"), lambda r: _texts(r)),
    "guide_type": lambda r: r.choice(("json", "regex", "ebnf_grammar", "")),
    "guide_text": lambda r: r.choice(('{"type": "object"}', "a+", "(", "")),
    **dict.fromkeys(
        (
            *("store", "return_token_ids", "add_generation_prompt", "parallel_tool_calls", "echo"),
            *("exclude_prompt", "binary_data_output", "empty_final_response"),
        ),
        lambda r: r.random() < 0.5,
    ),
}
"""Values by the target of a parameter."""

_NAMED: dict[tuple[str, str], Callable[[random.Random], Any]] = {
    ("completion", "logprobs"): lambda r: r.randrange(6),
    ("responses", "tool_choice"): lambda r: r.choice(("none", {"type": "function", "name": "f"}, _ALLOWED)),
    ("generate", "lora_task_id"): lambda r: r.choice((0, 7)),
}
"""Values by form and name, where those of a target differ."""

_GUIDES: dict[str, Callable[[random.Random], Any]] = {
    "grammar": lambda r: r.choice(({"type": "json", "value": _SCHEMA}, {"type": "regex", "value": "a+"})),
    "guided_json": lambda r: r.choice((_SCHEMA, '{"type": "object"}', {})),
    "guided_regex": lambda r: r.choice(("a+", "[0-9]{3}", "(", "\\")),
    "guided_choice": lambda r: r.sample(_WORDS, 3),
    "guided_grammar": lambda r: r.choice(('root ::= "yes" | "no"', "root ::=", "::")),
    "structured_outputs": lambda r: r.choice(({"json": _SCHEMA}, {"regex": "a+"}, {"choice": ["a"]}, {})),
    "output_format": lambda r: {"type": "json_schema", "schema": _SCHEMA},
    "response_format": lambda r: r.choice(({"type": "text"}, {"type": "json_object"}, {"type": "json_schema"})),
    "structural_tag": lambda r: r.choice(({"type": "structural_tag", "format": {"type": "any_text"}}, "{", {})),
    "guided_decoding": lambda r: r.choice(({"json": _SCHEMA}, {"regex": "a+"}, {"json_object": True}, {})),
}


def _texts(source: random.Random) -> list[str]:
    return source.choices((PROMPT, "Once", "", "🦊 and ﷽", "wood " * 60), k=source.choice((1, 2, 2, 3, 30)))


_PROMPTS = (PROMPT, "Once", " ", "🦊 and \u0000 and ﷽", "the wolf " * 40, "wood " * 500, "", "\n\n")


@dataclass(frozen=True)
class Form:
    """One kind of request body: its paths (whole, stream), the table of its parameters, and how it is put together.

    `prompt` is the member with the prompt. `parameters`: they are in a member of that name. One for vectors or scores
    has `texts`, the member without which most of its requests would be refused, and no streams.
    """

    paths: tuple[str, str]
    table: Table
    prompt: str
    parameters: bool = False
    texts: str = ""

    @property
    def names(self) -> list[str]:
        """The parameters that something reads, and that are not set otherwise."""
        fixed = {self.prompt, "stream", "messages"}
        return sorted(name for name, row in self.table.rows.items() if row.target != IGNORED and name not in fixed)

    @property
    def limits(self) -> list[str]:
        """The names of the number of new tokens."""
        return [name for name, row in self.table.rows.items() if row.target == "max_new_tokens"]

    def body(self, prompt: Any, parameters: Any, stream: Any) -> dict[str, Any]:
        """`parameters` is an object, unless they are in a member."""
        given = {"parameters": parameters} if self.parameters else parameters
        if self.texts:
            return {self.prompt: prompt, **given}
        return {self.prompt: prompt, "stream": stream, **given}


_INVOCATIONS = ("/invocations", "/invocations")
_GENERATE = ("/v2/models/ensemble/generate", "/v2/models/ensemble/generate_stream")
FORMS = {
    "inputs": Form(_INVOCATIONS, lmi.INPUTS_PARAMETERS, "inputs", parameters=True),
    "chat": Form(_INVOCATIONS, openai.CHAT_FIELDS, "messages"),
    "openai": Form(("/v1/chat/completions",) * 2, openai.CHAT_FIELDS, "messages"),
    "completion": Form(("/v1/completions",) * 2, openai.COMPLETION_FIELDS, "prompt"),
    "tgi": Form(("/", "/generate_stream"), tgi.PARAMETERS, "inputs", parameters=True),
    "messages": Form(("/v1/messages",) * 2, messages.FIELDS, "messages"),
    "responses": Form(("/v1/responses",) * 2, responses.FIELDS, "input"),
    "generate": Form(_GENERATE, triton.ENSEMBLE.fields, "text_input"),
    "truss": Form(("/predict", "/predict"), truss.FIELDS, "prompt"),
}
POOLED = {
    "embeddings": Form(("/v1/embeddings",) * 2, embeddings.FIELDS, "input", texts="input"),
    "rerank": Form(("/v1/rerank", "/v2/rerank"), rerank.RERANK_FIELDS, "query", texts="documents"),
    "texts": Form(("/rerank",) * 2, rerank.TEXTS_FIELDS, "query", texts="texts"),
    "score": Form(("/score", "/v1/score"), rerank.SCORE_FIELDS, "text_1", texts="text_2"),
    "tei": Form(("/embed",) * 2, embeddings.TEI_FIELDS, "inputs", texts="inputs"),
}
"""The forms for models that embed or score."""
_OFTEN = [*FORMS, "inputs", "inputs", "inputs", "chat"]
"""What is asked most has the most parameters in the engine."""


@dataclass(frozen=True)
class RandomRequest:
    """A request's form and body, and after how many parts of the answer its client leaves (None: it stays)."""

    form: str
    path: str
    body: Any
    leave_after: int | None
    reset: bool


def random_request(source: random.Random, form_name: str = "") -> RandomRequest:
    """A request of this form; of any form where none is named."""
    form_name = form_name or source.choice(_OFTEN)
    form = (FORMS | POOLED)[form_name]
    count = source.choice((0, 1, 1, 2, 2, 3, 4, 6))
    names = source.sample(form.names, min(count, len(form.names)))
    parameters: Any = {name: _value(source, form_name, name) for name in names}
    # Most should be answered soon.
    if form.texts and form.texts != form.prompt and source.random() < 0.98:
        parameters[form.texts] = _texts(source)
    elif not form.texts and source.random() < 0.85:
        parameters.setdefault(source.choice(form.limits), source.randrange(1, 16))
    stream: Any = source.random() < 0.5
    path = form.paths[stream]
    if source.random() < 0.01:
        stream = source.choice(_ANYTHING)
    if source.random() < 0.01:
        parameters[source.choice(("inputs", "unheard_of", "max_tokenz", ""))] = source.choice(_ANYTHING)
    if form.parameters and source.random() < 0.01:
        parameters = source.choice(_ANYTHING)
    body: Any = form.body(_prompt(source, form), parameters, stream)
    if source.random() < 0.005:
        body = source.choice(_ANYTHING)
    leaves = source.random() < 0.12
    return RandomRequest(
        form_name, path, body, source.choice((0, 0, 1, 2, 3)) if leaves else None, source.random() < 0.5
    )


def _prompt(source: random.Random, form: Form) -> Any:
    prompt = source.choice(_PROMPTS) if source.random() < 0.2 else PROMPT
    if form.texts == form.prompt and source.random() < 0.7:
        return source.choice((_texts(source), [5, 6, 7], [[5], [6, 7]]))
    if source.random() < 0.02:
        return source.choice((*_ANYTHING, [{"role": "user"}], [{"role": 1, "content": "x"}]))
    if form is FORMS["responses"] and source.random() < 0.5:
        return _conversation(source, prompt, _ITEMS)
    if form is FORMS["messages"] and source.random() < 0.5:
        blocks = _conversation(source, prompt, _BLOCKS)
        return [
            {"role": source.choice(("user", "assistant", "system")), "content": blocks},
            {"role": "user", "content": prompt},
        ]
    return [{"role": "user", "content": prompt}] if form.prompt == "messages" else prompt


_TEXT = {"type": "text", "text": "the wolf"}
_BLOCKS: tuple[dict[str, Any], ...] = (
    _TEXT,
    {"type": "tool_use", "id": "a", "name": "f", "input": {"name": "x"}},
    {"type": "tool_result", "tool_use_id": "a", "content": [_TEXT], "is_error": True},
    {"type": "thinking", "thinking": "", "signature": "AAAA"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
)
_ITEMS: tuple[dict[str, Any], ...] = (
    {"role": "developer", "content": [{"type": "input_text", "text": "the wolf"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "namespace": "n", "arguments": "{"},
    {"type": "function_call_output", "call_id": "a", "output": "it rains"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "AAAA"},
    {"type": "item_reference", "id": f"msg_{'0' * 32}_0"},
    {"type": "web_search_call"},
)


_DATA_URLS: tuple[str, ...] = tuple(
    data_url(encoded(picture(width, height), form), f"image/{form.lower()}")
    for form, width, height in (("PNG", 56, 56), ("JPEG", 90, 40), ("WEBP", 33, 70), ("GIF", 20, 20), ("PNG", 700, 3))
)
_ADDRESSES = (
    *("http://127.0.0.1:1/a.png", "https://localhost/a", "http://169.254.169.254/latest", "file:///etc/passwd"),
    *("data:,", "data:image/png;base64,", "data:image/svg+xml;base64,PHN2Zy8+", "https://[::1]/", "http://"),
)


def random_image(source: random.Random, damaged: Callable[[random.Random, bytes], bytes]) -> str:
    """The address of an image: one that can be read, one whose file or text is `damaged`, or another one."""
    url = source.choice(_DATA_URLS)
    match source.randrange(4):
        case 0:
            return url
        case 1:
            return damaged(source, url.encode()).decode("utf-8", "replace")
        case 2:
            return data_url(damaged(source, base64.b64decode(url.partition(",")[2])))
    return source.choice(_ADDRESSES)


_IMAGE_PARTS: tuple[Callable[[str], dict[str, Any]], ...] = (
    lambda url: {"type": "image_url", "image_url": {"url": url}},
    lambda url: {"type": "image_url", "image_url": url},
    lambda url: {"type": "input_image", "image_url": url},
    lambda url: {"type": "image", "source": {"type": "url", "url": url}},
    lambda url: {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]},
    },
)


def random_image_request(source: random.Random, damaged: Callable[[random.Random, bytes], bytes]) -> RandomRequest:
    """A chat with images, of any dialect that has them."""
    form_name = source.choice(("chat", "openai", "messages", "responses"))
    form = FORMS[form_name]
    parts: list[Any] = []
    for _ in range(source.choice((1, 1, 1, 2, 3, 20))):
        part: dict[str, Any] = source.choice(_IMAGE_PARTS)(random_image(source, damaged))
        if source.random() < _MAYBE_WRONG:
            part[source.choice([*part])] = source.choice(_ANYTHING)
        parts += source.sample([part, {"type": "text", "text": source.choice(_WORDS)}], 2)
    stream = source.random() < 0.5
    limit = source.choice(form.limits)
    body = form.body([{"role": "user", "content": parts}], {limit: source.randrange(1, 9)}, stream)
    return RandomRequest(form_name, form.paths[stream], body, None, False)


def _conversation(source: random.Random, prompt: str, kinds: tuple[dict[str, Any], ...]) -> list[Any]:
    """Blocks or items, some with a member of any type; the last is a text."""
    found: list[Any] = []
    for kind in source.choices(kinds, k=source.randrange(4)):
        wrong = source.random() < _MAYBE_WRONG
        found.append(kind | {source.choice([*kind]): source.choice(_ANYTHING)} if wrong else dict(kind))
    return [*found, {"type": "text", "text": prompt} if kinds is _BLOCKS else {"role": "user", "content": prompt}]


def _value(source: random.Random, form: str, name: str) -> Any:
    if source.random() < _MAYBE_WRONG:
        return source.choice(_ANYTHING)
    row: Parameter = (FORMS | POOLED)[form].table.rows[name]
    if row.target is None:
        return source.choice((*row.neutral, None))
    return (_NAMED.get((form, name)) or _GUIDES.get(name) or _VALUES[row.target])(source)
