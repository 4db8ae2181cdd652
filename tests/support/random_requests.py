"""Random requests of the LMI dialect: every parameter, with values that are right and values that are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from djl_trtllm.api.lmi.parameters import CHAT_FIELDS, INPUTS_PARAMETERS
from djl_trtllm.api.parameters import IGNORED
from tests.support.models import PROMPT

MOST_TOKENS = 200
"""Of one sequence; the server that gets the requests has this limit."""

ADAPTER = "french"
"""One that the server has."""

_WORDS = PROMPT.split()
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
_MAYBE_WRONG = 0.1
"""Of the values of a request, so many are of any type and size."""

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
    "details": lambda r: r.random() < 0.8,
    "return_full_text": lambda r: r.random() < 0.5,
    "prefill": lambda r: r.random() < 0.5,
    "logprobs": lambda r: r.random() < 0.8,
    "stream_options": lambda r: r.choice(({}, {"include_usage": True}, {"include_usage": 1, "x": None})),
    "adapter": lambda r: r.choice(("", ADAPTER, [ADAPTER], "unheard of", [])),
    "output_formatter": lambda r: r.choice(
        ("json", "jsonlines", "sse", "json_chat", "jsonlines_chat", "sse_chat", "3p", "3p_stream", "none", "unheard of")
    ),
}
"""By the target of a parameter."""

_GUIDES: dict[str, Callable[[random.Random], Any]] = {
    "grammar": lambda r: r.choice(({"type": "json", "value": _SCHEMA}, {"type": "regex", "value": "a+"})),
    "guided_json": lambda r: r.choice((_SCHEMA, '{"type": "object"}', {})),
    "guided_regex": lambda r: r.choice(("a+", "[0-9]{3}", "(", "\\")),
    "guided_choice": lambda r: r.sample(_WORDS, 3),
    "guided_grammar": lambda r: r.choice(('root ::= "yes" | "no"', "root ::=", "::")),
    "response_format": lambda r: r.choice(({"type": "text"}, {"type": "json_object"}, {"type": "json_schema"})),
    "guided_decoding": lambda r: r.choice(({"json": _SCHEMA}, {"regex": "a+"}, {"json_object": True}, {})),
}

_PROMPTS = (PROMPT, "Once", " ", "🦊 and \u0000 and ﷽", "the wolf " * 40, "wood " * 500, "", "\n\n")


@dataclass(frozen=True)
class RandomRequest:
    """A request's body, and after how many parts of the answer its client leaves (None: it stays)."""

    body: Any
    leave_after: int | None
    reset: bool


def random_request(source: random.Random) -> RandomRequest:
    """One request."""
    chat = source.random() < 0.3
    names = (CHAT_FIELDS if chat else INPUTS_PARAMETERS).rows
    count = source.choice((0, 1, 1, 2, 2, 3, 4, 6))
    parameters = {name: _value(source, name, chat) for name in source.sample(sorted({*names} - _FIXED), count)}
    # Most should be answered soon.
    if source.random() < 0.85:
        name = source.choice(("max_tokens", "max_new_tokens")) if chat else "max_new_tokens"
        parameters.setdefault(name, source.randrange(1, 16))
    stream: Any = source.random() < 0.5
    if source.random() < 0.01:
        stream = source.choice(_ANYTHING)
    if source.random() < 0.01:
        parameters[source.choice(("inputs", "unheard_of", "max_tokenz", ""))] = source.choice(_ANYTHING)
    body: Any = {"stream": stream} | (_chat(source, parameters) if chat else _inputs(source, parameters))
    if source.random() < 0.005:
        body = source.choice(_ANYTHING)
    leaves = source.random() < 0.12
    return RandomRequest(body, source.choice((0, 0, 1, 2, 3)) if leaves else None, source.random() < 0.5)


def _chat(source: random.Random, parameters: dict[str, Any]) -> dict[str, Any]:
    content = source.choice(_PROMPTS) if source.random() < 0.2 else PROMPT
    messages: Any = [{"role": "user", "content": content}]
    if source.random() < 0.02:
        messages = source.choice((*_ANYTHING, [{"role": "user"}], [{"role": 1, "content": "x"}]))
    return {"messages": messages} | parameters


def _inputs(source: random.Random, parameters: Any) -> dict[str, Any]:
    inputs = source.choice(_PROMPTS) if source.random() < 0.2 else PROMPT
    if source.random() < 0.01:
        inputs = source.choice(_ANYTHING)
    if source.random() < 0.01:
        parameters = source.choice(_ANYTHING)
    return {"inputs": inputs, "parameters": parameters}


IGNORED_NAMES = {
    name for table in (INPUTS_PARAMETERS, CHAT_FIELDS) for name, row in table.rows.items() if row.target == IGNORED
} - {"messages"}
"""Names that are accepted with every value, because nothing reads them."""

_FIXED = frozenset({"messages", "stream"}) | IGNORED_NAMES
"""Those, and fields of a chat that are set otherwise."""


def _value(source: random.Random, name: str, chat: bool) -> Any:
    if source.random() < _MAYBE_WRONG:
        return source.choice(_ANYTHING)
    row = (CHAT_FIELDS if chat else INPUTS_PARAMETERS).rows[name]
    if row.target is None:
        return source.choice((*row.neutral, None))
    return _GUIDES[name](source) if name in _GUIDES else _VALUES[row.target](source)
