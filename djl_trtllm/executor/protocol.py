"""The messages between the server and the executor host process.

Token ids in, token ids out. Everything that concerns text (stop strings, detokenising, n and best_of) happens
above. Frames on the socket are a 4-byte little-endian length and a MessagePack body.

What an executor promises:

- `Submit` never fails as such; what is wrong with it arrives as the request's terminal `Delta`.
- Deltas carry new tokens only, in order, one delta per request and iteration.
- Every request gets exactly one delta with a `finish`; its sequence slot and KV cache blocks are free once that
  delta was sent, not before. That holds for cancelled requests too: their terminal delta comes late.
- While a request is unfinished the host sends a `Step` at least every few seconds; `Ping` is answered between two
  steps. A host that is silent for longer is hung.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, TypeAlias

import msgspec

from djl_trtllm.request import Adapter, Guide


class Finish(enum.IntEnum):
    """Why an executor ended a request."""

    END = 1
    """An end token, or one of `Submit.stop_token_ids`; the last token id is the one that ended it."""
    LENGTH = 2
    """`max_new_tokens` were generated."""
    CANCELLED = 3
    """A `Cancel` took effect."""
    ERROR = 4
    """This request failed; `Delta.error` says why."""


class Feature(str, enum.Enum):
    """What an executor can do beyond plain sampling; `Ready.features` lists what a started one has.

    A request that needs a feature its executor lacks is refused above it, by name.
    """

    LOGPROBS = "logprobs"
    FREE_LOGPROBS = "free_logprobs"
    """Log-probabilities cost next to nothing: they are asked for wherever an answer has a place for them."""
    JSON = "json"
    """Output that is any JSON object, or one of a JSON schema."""
    REGEX = "regex"
    GRAMMAR = "grammar"
    """EBNF grammars."""
    ADAPTERS = "adapters"
    BEAM_SEARCH = "beam_search"
    MIN_P = "min_p"
    NO_REPEAT_NGRAM = "no_repeat_ngram"
    BAD_WORDS = "bad_words"


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence is sampled. Greedy if and only if `do_sample` is False and `beam_width` is 1."""

    max_new_tokens: int
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """0 means the whole vocabulary."""
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    logprobs: bool = False
    """Whether to return the chosen token's log-probability with each token."""
    min_p: float = 0.0
    no_repeat_ngram_size: int = 0
    """0 means no such rule."""
    beam_width: int = 1
    """More than 1 is beam search: see `Submit`."""
    length_penalty: float = 1.0
    early_stopping: bool = False
    beam_search_diversity_rate: float = 0.0


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """First message to a host: which executor to run (`module:Class`), and its own `options`."""

    executor: str
    options: dict[str, Any]


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Generate one sequence. `request_id` is unique among live requests and never negative.

    With a `beam_width` of k it is k sequences, whose ids are `request_id` to `request_id` + k - 1, the best first. Each
    gets deltas of its own and its one terminal delta; a `Cancel` of the first ends them all.
    """

    request_id: int
    prompt_ids: list[int]
    sampling: Sampling
    stop_token_ids: list[int] = []
    """Ids that end the sequence, end-of-sequence ids included."""
    stop: list[str] = []
    """Stop strings at which the executor may end by itself, its output including the string. Those it does not find
    are found above it, which cancels then."""
    bad: list[str] = []
    """Strings whose tokens must not come in sequence."""
    guide: Guide | None = None
    adapter: Adapter | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop generating for a request. Unknown and finished ids are fine: the message may cross the last delta."""

    request_id: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Asks an idle host for a sign of life."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the process; unfinished requests are dropped."""


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """What a started executor can hold.

    `max_sequences`: running at once. `kv_blocks` and `block_size` (tokens): the paged KV cache; `kv_blocks` is 0
    where the executor admits by itself. `max_seq_len`: prompt plus output of one sequence, in tokens.
    `lookahead`: how many more than `max_sequences` the executor wants queued inside itself.
    """

    max_sequences: int
    kv_blocks: int
    block_size: int
    max_seq_len: int
    lookahead: int = 0


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine is loaded and can generate."""

    limits: Limits
    details: dict[str, Any] = {}
    """For the log: device, precision, versions, KV cache size."""
    features: list[Feature] = []


class Delta(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one request in one iteration.

    `cached_tokens` is told once, with the first delta: how many prompt tokens came out of the prefix cache.
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[float] | None = None
    finish: int = 0
    """0 while running, else a `Finish`."""
    error: str | None = None
    cached_tokens: int = 0


class Stats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine's state after an iteration. `kv_usage` is the used share of the KV cache, 0 to 1.

    What an engine does not tell is 0: `queued` requests wait inside it, `paused` ones gave their KV cache up for
    others, `iterations` were run, the last in `iteration_seconds`; `kv_hit_rate` is the share of KV cache blocks that
    were reused, 0 to 1.
    """

    running: int = 0
    kv_usage: float = 0.0
    queued: int = 0
    paused: int = 0
    iterations: int = 0
    iteration_seconds: float = 0.0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    kv_hit_rate: float = 0.0


class Step(msgspec.Struct, array_like=True, tag="step"):
    """One iteration: everything that is new since the last."""

    deltas: list[Delta]
    stats: Stats


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Answer to `Ping`."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot go on; the process ends after this. At start-up: it could not be loaded."""

    message: str


ToEngine: TypeAlias = Start | Submit | Cancel | Ping | Shutdown
FromEngine: TypeAlias = Ready | Step | Pong | Failed

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 * 1024 * 1024
"""Bytes. A longer frame means that the two sides are out of step."""

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: ToEngine | FromEngine) -> bytes:
    """The message as it goes over the socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Deframer:
    """Cuts a byte stream into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """All bodies that are complete after `data`; the rest is kept. Raises ValueError on a bad length."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise ValueError(f"frame of {length} bytes: the executor's stream is out of step")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        if start:
            del buffer[:start]
        return bodies
