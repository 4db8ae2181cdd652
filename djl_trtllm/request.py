"""Requests and their output, the same for every dialect and every backend.

A dialect parses bytes into a `GenerationRequest`. The rolling batch answers with a stream of `OutputChunk`s, one per
iteration that produced something. Each chunk has the new `Token`s of one sequence; the last one has its
`SequenceResult`. The texts of all tokens of a sequence join to its output text.

Defaults are neutral: they ask for nothing. `batching.features` refuses each field that a request sets and that the
engine does not honour, so that a new field is never dropped silently.
"""

from __future__ import annotations

import enum
import os
import random
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from djl_trtllm.errors import RequestError

_ids = random.Random()  # noqa: S311  # no secrets; its own, because a model's code may seed that of the module
os.register_at_fork(after_in_child=_ids.seed)


def new_uuid() -> uuid.UUID:
    """A random UUID that need not be secret, without the system call of `uuid.uuid4`."""
    return uuid.UUID(int=_ids.getrandbits(128), version=4)


class FinishReason(enum.IntEnum):
    """Why a sequence ended, the worst last. Dialects have their own words for these."""

    END_TOKEN = 1
    """The model's own end token."""
    STOP = 2
    """A stop string, or one of the request's stop token ids."""
    LENGTH = 3
    """`max_new_tokens` were generated."""
    CANCELLED = 4
    ERROR = 5


class GuideKind(str, enum.Enum):
    """How a guide describes the output."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """Constrains the output to a JSON schema (as text), a regular expression or a grammar (EBNF or Lark)."""

    kind: GuideKind
    value: str = ""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its name, an id that is unique while the engine process lives, and its directory."""

    name: str
    id: int
    path: str


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How sequences are sampled. The dialect fills it in, and the engine process receives the same struct.

    Greedy if and only if `do_sample` is False. `max_new_tokens` 0 means that the client gives no number.
    `seed` None draws a new seed for each request; sequence i of a request uses `seed` + i.
    `best_of` None: `n` sequences, in the order of their index, as their tokens arrive. Otherwise `best_of` sequences
    are generated and ranked by cumulative log-probability; the best `n` are delivered at the end as 0 to n - 1. With a
    `beam_width` above 1, the best `n` beams are delivered, ranked by the engine; the fields after it belong to beam
    search.

    The engine gets one sequence, or all beams: there `max_new_tokens` is final, and `seed` is the sequence's own.
    """

    max_new_tokens: int = 0
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """0 means the whole vocabulary."""
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    min_p: float = 0.0
    no_repeat_ngram_size: int = 0
    """0 turns it off."""
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    beam_search_diversity_rate: float = 0.0

    @property
    def sequences(self) -> int:
        """How many sequences are generated."""
        return self.beam_width if self.beam_width > 1 else self.best_of or self.n


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, before tokenising.

    Exactly one of `prompt`, `prompt_ids` and `messages` (chat, for the tokenizer's chat template) is set.
    `stop` strings end a sequence and are not part of its text. `logprobs`: return the chosen token's log-probability
    with each token, if the engine has it. `asks_logprobs`: the client asked for it, not only the answer's format.
    `needs_logprobs`: refuse the request if the engine does not have it. `top_logprobs`: how many of the most likely
    tokens come with each token (`RankedToken`). `truncate` keeps the last N prompt tokens.
    `bad` strings are not generated, `guide` constrains the output, `adapter` is the name of a LoRA adapter.
    `default_new_tokens` are generated if `sampling.max_new_tokens` is 0, or fewer where a limit is lower; 0: as many as
    the limits allow.
    `template` has the keywords of the chat template beside the messages (`tools`, `add_generation_prompt`, ...).
    `shown_tokens` are special tokens whose text is part of the output, such as the markers of tool calls.
    `guide_from` is the parameter that asks for the guide, where that is not a guide by its name.
    """

    prompt: str | None = None
    prompt_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    asks_logprobs: bool = False
    needs_logprobs: bool = False
    top_logprobs: int = 0
    truncate: int | None = None
    bad: tuple[str, ...] = ()
    guide: Guide | None = None
    adapter: str | None = None
    default_new_tokens: int = 0
    shown_tokens: tuple[str, ...] = ()
    guide_from: str | None = None


class Origin(NamedTuple):
    """Where a request comes from: the id by which its client knows it, and the dialect that it was written in.

    Requests with one `client` share what a client gets of the batch; "" is a client too. Those with a higher `priority`
    go first: 1, 0 or -1.
    """

    request_id: str = ""
    dialect: str = ""
    client: str = ""
    priority: int = 0


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token. `text` is what it adds to the output: "" for special tokens and unfinished characters.

    Special tokens that the request wants to see (`shown_tokens`) have their text.
    """

    id: int
    text: str
    logprob: float | None
    special: bool


class Alternative(NamedTuple):
    """One of the most likely tokens at a position."""

    id: int
    text: str
    logprob: float


class RankedToken(Token, frozen=True, gc=False):
    """A token of a request that has `top_logprobs`. `top` may lack the token itself, and is empty if unknown."""

    top: list[Alternative]


class SequenceResult(NamedTuple):
    """The end of one sequence. `generated_tokens` counts the end token; `seed` is None for greedy sequences.

    `queue_seconds` is how long its request waited before it ran.
    """

    reason: FinishReason
    generated_tokens: int
    cumulative_logprob: float | None
    seed: int | None
    stop_sequence: str | None = None
    error: RequestError | None = None
    queue_seconds: float = 0.0


class OutputChunk(msgspec.Struct, frozen=True, gc=False):
    """The new output of one sequence since the last chunk.

    `index` is the sequence (0 to n - 1) of its request, `generation` the request among those of one call.
    """

    index: int
    tokens: list[Token]
    finished: SequenceResult | None
    generation: int = 0


Consumer = Callable[[OutputChunk], None]
"""Receives the chunks of one request, in order. Called by the rolling batch; must neither block nor raise."""
