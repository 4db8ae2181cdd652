"""What is asked of a model and what comes back, the same for every dialect and every backend.

A dialect parses bytes into a `GenerationRequest`; the rolling batch answers with a stream of `OutputChunk`s, one per
iteration in which something happened, each with the new `Token`s of one sequence and, in the last, its
`SequenceResult`.
Joining the texts of all tokens of a sequence gives its whole output text.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from djl_trtllm.errors import RequestError


class FinishReason(str, enum.Enum):
    """Why a sequence ended, in the words of the LMI schema."""

    EOS_TOKEN = "eos_token"  # noqa: S105
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class GuideKind(str, enum.Enum):
    """What holds output to a form."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """A form that the output is held to: a JSON schema as text, a regular expression or an EBNF grammar."""

    kind: GuideKind
    value: str = ""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its name, an id that is unique in the life of the host, and its directory."""

    name: str
    id: int
    path: str


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling as the request asks for it; the defaults are the LMI schema's.

    Greedy if and only if `do_sample` is False. `max_new_tokens` 0 means as many as fit (at most `max_output_len`).
    `seed` None draws a fresh one per request; sequence i of a request uses `seed` + i.
    `best_of` None: `n` sequences, in the order of their index, as their tokens come. Otherwise `best_of` sequences are
    generated, ranked by cumulative log-probability, and the best `n` delivered at the end as 0 to n - 1. With a
    `beam_width` above 1 it is the best `n` beams, ranked by the engine; the fields after it belong to beam search.
    """

    max_new_tokens: int = 30
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
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
    `stop` strings end a sequence and are not part of its text; `logprobs` asks for the chosen token's
    log-probability with every token where the engine gives it: `asks_logprobs` says that the client did and not only
    the format of its answer, `needs_logprobs` that the request is no use without. `truncate` keeps the last so many
    prompt tokens. `bad` strings must not come, `guide` holds the output to a form, `adapter` is the name of a LoRA
    adapter.
    """

    prompt: str | None = None
    prompt_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: SamplingParameters = SamplingParameters()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    asks_logprobs: bool = False
    needs_logprobs: bool = False
    truncate: int | None = None
    bad: tuple[str, ...] = ()
    guide: Guide | None = None
    adapter: str | None = None


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token. `text` is what it adds to the output: "" for special and not yet printable tokens."""

    id: int
    text: str
    logprob: float | None
    special: bool


class SequenceResult(NamedTuple):
    """The end of one sequence. `generated_tokens` counts the end token; `seed` is None for greedy sequences."""

    reason: FinishReason
    generated_tokens: int
    cumulative_logprob: float | None
    seed: int | None
    stop_sequence: str | None = None
    error: RequestError | None = None


class OutputChunk(msgspec.Struct, frozen=True, gc=False):
    """What is new in one sequence (`index` of 0 to n - 1) since the last update."""

    index: int
    tokens: list[Token]
    finished: SequenceResult | None


Consumer = Callable[[OutputChunk], None]
"""Receives the updates of one request, in order. Called by the rolling batch; must neither block nor raise."""
