"""The messages between the server and the engine process; see `executor.process.AnyExecutor`.

Token ids in, token ids out. The server does everything that concerns text: stop strings, detokenising, `n` and
`best_of`. A frame on the socket is a 4-byte little-endian length and a MessagePack body.
"""

import contextlib
import enum
import itertools
import json
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from djl_trtllm.request import Adapter, FinishReason, Guide, GuideKind, Image, Pooling, Sampling, TaskName


class Feature(str, enum.Enum):
    """A capability that a request may need of an engine and that is not one field of `Sampling` or `GenerationRequest`.

    `Ready.features` lists those of a started executor, beside the names of the fields that it honours.
    """

    LOGPROBS = "logprobs"
    BEAM_LOGPROBS = "beam_logprobs"
    """Log-probabilities of beams too."""
    FREE_LOGPROBS = "free_logprobs"
    """Log-probabilities cost next to nothing: request them wherever an answer has a place for them."""
    JSON = "json"
    """Output that is any JSON object, or one of a JSON schema."""
    REGEX = "regex"
    GRAMMAR = "grammar"
    """EBNF grammars."""
    STRUCTURAL_TAG = "structural_tag"
    ADAPTERS = "adapters"


GUIDES: frozenset[str] = frozenset({Feature.JSON, Feature.REGEX, Feature.GRAMMAR, Feature.STRUCTURAL_TAG})
"""All kinds of guides."""
LOGPROBS: frozenset[str] = frozenset({Feature.LOGPROBS, Feature.BEAM_LOGPROBS, "top_logprobs"})
"""Features that are lost where log-probabilities fail."""
PENALTIES: frozenset[str] = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty"})
"""Features that are lost where penalties fail."""
IMAGES: frozenset[str] = frozenset({"images"})


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """First message to an engine process: which executor to run (`module:Class`), and the executor's `options`."""

    executor: str
    options: dict[str, Any]
    stream_interval: int = 1
    """Iterations whose output is sent together."""
    send_interval: float = 0.0
    """Seconds for which output waits for more. An engine that runs its own iterations heeds neither interval."""
    kernels: str = ""
    """The folder in which compiled kernels are kept for later engine processes; "" leaves it to the compilers."""
    reasons: str = ""
    """A regular expression: the lines of the engine's log that say why a load fails. "" for none."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Generate one sequence. `request_id` is unique among live requests and never negative.

    With a `beam_width` of k it is k sequences, whose ids are `request_id` to `request_id` + k - 1, the best first. Each
    gets tokens of its own and its one end; a `Cancel` of the first ends them all.
    """

    request_id: int
    prompt_ids: Sequence[int]
    sampling: Sampling
    stop_token_ids: list[int] = []
    """Ids that end the sequence, end-of-sequence ids included."""
    stop: list[str] = []
    """Stop strings at which the executor may end the sequence itself; its output includes the string. The server finds
    all others and cancels the request."""
    bad: tuple[str, ...] = ()
    """Strings whose tokens are not generated in sequence."""
    guide: Guide | None = None
    adapter: Adapter | None = None
    logprobs: bool = False
    """Whether to return the chosen token's log-probability with each token."""
    top_logprobs: int = 0
    """The number of the most likely tokens to return with each token; none with beams."""
    origin: str = ""
    """The id of the client's request, for lines of the log."""
    client: str = ""
    """The client of the request, whose requests share the time in which guides are tried."""
    prompt_logprobs: int | None = None
    """How many of the most likely tokens to return with each token of the prompt; None: no log-probabilities of it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    cache_salt: str = ""
    """The salt of the prefix cache: no prompt reuses blocks of a prompt with another salt."""
    images: tuple[Image, ...] = ()
    """The images of the prompt, in the order of their placeholders among `prompt_ids`."""
    repeated_ids: list[int] = []
    """Tokens that the sequence has had already (`Limits.repeats`): it begins anew, and its first tokens are these."""
    pooling: Pooling | None = None
    """The prompt becomes a vector (`Step.vectors`) and nothing is generated; its end is LENGTH."""


class Try(msgspec.Struct, frozen=True, array_like=True, tag="try"):
    """Try a guide for a request that has no place yet (`Limits.tries_guides`).

    `request_id` is an id as of `Submit`, of the trial alone: it has one end, STOP for a guide that can be
    used. `origin` and `client` as in `Submit`.
    """

    request_id: int
    guide: Guide
    origin: str = ""
    client: str = ""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop generating for a request, or a trial. Unknown and finished ids are ignored: it may cross the end."""

    request_id: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Checks that an idle engine process is alive."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the process; unfinished requests are dropped."""


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """The capacity of a started executor.

    `max_sequences`: running at once. `kv_blocks` and `block_size` (tokens): the paged KV cache; `kv_blocks` is 0
    where the executor admits requests itself. `max_seq_len`: prompt plus output of one sequence, in tokens.
    `lookahead`: how many sequences beyond `max_sequences` the executor queues itself. `stops`: whether it is given stop
    ids and stop strings; where not, the server ends sequences at them (beams excepted) and cancels. `stops_ignored`:
    whether it is given none of a request that ignores the end token. `beams`: every request must have exactly this
    many; 0 where each says how many, up to `most_beams` (0: any number). `seeded`: whether a request's seed decides its
    tokens. `draws_seeds`: whether a sampled sequence gets a seed where its request gives none. `max_prompt_len`: tokens
    of the longest prompt (0: `max_seq_len`). `tries_guides`: whether it takes `Try`, so that a request waits for the
    trial of its guide without a place. `draft_tokens`: above 0 where it speculates; tokens that a sequence may have
    beyond its own in the KV cache, where `kv_blocks` counts, while they are verified.
    `repeats`: a sequence that goes on after the loss of an engine process begins anew (`Submit.repeated_ids`), because
    the engine takes no tokens after its prompts. `task`: what each request has to be for. `dimensions`: of its vectors.
    """

    max_sequences: int
    kv_blocks: int
    block_size: int
    max_seq_len: int
    lookahead: int = 0
    stops: bool = True
    beams: int = 0
    seeded: bool = True
    most_beams: int = 0
    max_prompt_len: int = 0
    tries_guides: bool = False
    draft_tokens: int = 0
    repeats: bool = False
    task: TaskName = "generate"
    dimensions: int = 0
    draws_seeds: bool = True
    stops_ignored: bool = False


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine is loaded and can generate."""

    limits: Limits
    details: dict[str, Any] = {}
    """Facts for the log: device, precision, versions, size of the KV cache."""
    features: frozenset[str] = frozenset()
    """The fields of `Sampling` and `GenerationRequest` that the executor honours, and each `Feature` that it has."""


class Ranked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token's log-probability, and the most likely tokens at its position, the most likely first."""

    logprob: float | None
    ids: list[int]
    logprobs: list[float]


Logprob: TypeAlias = float | Ranked | None
"""The log-probability that an engine reports for a token; None if it reports nothing."""


class FullQueue(msgspec.Struct, frozen=True, array_like=True):
    """The refusal of a queue of the executor that is full; trying again after `retry_after` seconds may help."""

    depth: int
    capacity: int
    retry_after: int


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why a request is refused that only the engine finds wrong, or that comes too early (`full`)."""

    message: str
    full: FullQueue | None = None


class FirstRequest(NamedTuple):
    """A request of the engine process itself, before clients', so that code is compiled before its first use."""

    kind: str
    """How the log names the request, for example "a sampled request"."""
    request: Submit
    features: frozenset[str] = frozenset()
    """The features that the engine loses if the request fails; if there are none, a failure ends the load."""

    def lost_by(self, error: str | Refusal | None, seconds: float) -> frozenset[str]:
        """The features that are lost because of how the request ended, after `seconds`; both are printed.

        Raises RuntimeError for an error of one that any client may send.
        """
        if error is None:
            print(f"warming up: {self.kind} took {seconds:.1f} s", flush=True)
            return frozenset()
        message = error if isinstance(error, str) else error.message
        if not self.features:
            raise RuntimeError(f"{self.kind} that is to warm the engine up has failed: {message}")
        without = ", ".join(sorted(self.features))
        print(f"warming up: {self.kind} has failed, so the engine does without {without}: {message}", flush=True)
        return self.features


def first_requests(
    features: frozenset[str], prompt: list[int], tokens: int, image: Submit | None = None, *, draws_seeds: bool = True
) -> list[FirstRequest]:
    """A request of each kind that an engine with these features serves with code of its own.

    `image` is one with an image, for an engine that takes such. `draws_seeds`: see `Limits`; without, a sampled
    sequence with a seed is a kind of its own.
    """
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 0.8}
    seeded: dict[str, Any] = {**sampled, "seed": 1 if "seed" in features else None}
    top: dict[str, Any] = {"top_k": 40, "top_p": 0.9}
    kinds: tuple[tuple[str, frozenset[str], dict[str, Any], dict[str, Any]], ...] = (
        ("penalties", PENALTIES, {"repetition_penalty": 1.1, "presence_penalty": 0.1}, {}),
        ("a seed", frozenset() if draws_seeds else frozenset({"seed"}), {**seeded, **top}, {}),
        ("min_p", frozenset({"min_p"}), {**seeded, "min_p": 0.1}, {}),
        ("log-probabilities", LOGPROBS, {}, {"logprobs": True}),
        ("the likeliest tokens", frozenset({"top_logprobs"}), {}, {"logprobs": True, "top_logprobs": 1}),
        ("a guide", GUIDES, {}, {"guide": Guide(GuideKind.REGEX, "[a-z]+")}),
    )
    found = [FirstRequest("a greedy request", Submit(0, prompt, Sampling(tokens)))]
    if "do_sample" in features:
        sampling = Sampling(tokens, **(seeded if draws_seeds else sampled), **top)
        found.append(FirstRequest("a sampled request (top_k, top_p)", Submit(0, prompt, sampling)))
    found += [
        FirstRequest(f"a request with {kind}", Submit(0, prompt, Sampling(tokens, **own), **given), features & lost)
        for kind, lost, own, given in kinds
        if features & lost
    ]
    return found if image is None else [*found, FirstRequest("a request with an image", image, IMAGES)]


class End(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of one request.

    `finish` is STOP for any of `Submit.stop_token_ids`; the last token id is then the one that ended it. `error` is the
    engine's error, or the reason why the request is wrong. `drafted` tokens were proposed by drafts, accepted ones
    included, where the engine counts them by request.
    """

    request_id: int
    finish: FinishReason
    error: str | Refusal | None = None
    drafted: int | None = None


class Stats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine's state after an iteration. `kv_usage` is the used share of the KV cache, 0 to 1.

    Figures that an engine does not report are None. `queued` requests wait inside it, `paused` ones gave up their KV
    cache for others. It has run `iterations`, the last in `iteration_seconds`. `kv_hit_rate` is the share of KV cache
    blocks that were reused, 0 to 1. `guides_waiting` wait for their trial or are in it; `guide_trials` have ended, in
    `guide_seconds`. Drafts have proposed `draft_tokens` in `drafts` iterations of sequences.
    """

    running: int = 0
    kv_usage: float | None = None
    queued: int | None = None
    paused: int | None = None
    iterations: int | None = None
    iteration_seconds: float | None = None
    kv_blocks: int | None = None
    kv_blocks_used: int | None = None
    kv_hit_rate: float | None = None
    guides_waiting: int | None = None
    guide_trials: int | None = None
    guide_seconds: float | None = None
    draft_tokens: int | None = None
    drafts: int | None = None


class Step(msgspec.Struct, array_like=True, tag="step"):
    """The news of one iteration, or of several (see `Start`), in columns.

    `[7, 8, 7]` with the counts `[2, 1, 1]` and the tokens `[5, 6, 90, 9]`: request 7 has the tokens 5, 6 and 9, request
    8 has 90. Nearly every step has one token for each request, so it has no counts. Ends come after all tokens.
    """

    ids: list[int] = []
    """The request of each row; one may have several rows."""
    tokens: list[int] = []
    """The tokens of all rows, one row's after the other's."""
    counts: list[int] = []
    """The number of tokens of each row. Empty: one token each."""
    logprobs: list[Logprob] = []
    """For each token; None where they are not wanted. Empty: nobody wants them."""
    ends: list[End] = []
    cached: dict[int, int] = {}
    """Prompt tokens from the prefix cache, by request, in its first step."""
    accepted: dict[int, int] = {}
    """Tokens that a draft had proposed, by request: what its iterations brought beyond one token each."""
    stats: Stats = Stats()
    prompts: dict[int, list[Logprob]] = {}
    """The log-probabilities of all tokens of a prompt, by request, before or with its first token.

    The first token has None."""
    vectors: dict[int, bytes] = {}
    """Vectors of the prompts with `Submit.pooling` that end here, by request: float32 in the machine's byte order."""

    def __post_init__(self) -> None:
        """Raise ValueError where the columns do not fit together; decoding does so, too."""
        rows, tokens = len(self.ids), len(self.tokens)
        if self.counts and (len(self.counts) != rows or min(self.counts) < 0):
            raise ValueError(f"a step has {rows} rows and {len(self.counts)} counts")
        if tokens != (sum(self.counts) if self.counts else rows):
            raise ValueError(f"a step of {rows} rows has {tokens} tokens")
        if self.logprobs and len(self.logprobs) != tokens:
            raise ValueError(f"a step has {tokens} tokens and {len(self.logprobs)} log-probabilities")

    def add(self, request_id: int, token_ids: Sequence[int], logprobs: Sequence[Logprob] | None = None) -> None:
        """Add tokens of a request. A log-probability is `Ranked` where `Submit.top_logprobs` asks for it.

        Raises ValueError, and adds nothing, where there is not one for each token: the server could not read the step.
        """
        tokens, values = self.tokens, self.logprobs
        if logprobs and len(logprobs) != len(token_ids):
            raise ValueError(f"the engine gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
        if len(token_ids) != 1 or self.counts:
            self.counts = self.counts or [1] * len(self.ids)
            self.counts.append(len(token_ids))
        if logprobs:
            if len(values) != len(tokens):
                values.extend([None] * (len(tokens) - len(values)))
            values.extend(logprobs)
        elif values:
            values.extend([None] * len(token_ids))
        self.ids.append(request_id)
        tokens.extend(token_ids)

    def end(
        self,
        request_id: int,
        finish: FinishReason,
        error: str | Refusal | None = None,
        drafted: int | None = None,
    ) -> None:
        """End a request."""
        self.ends.append(End(request_id, finish, error, drafted))

    @property
    def has_news(self) -> bool:
        return bool(self.ids or self.ends or self.cached or self.prompts)

    def rows(self) -> Iterator[tuple[int, list[int], list[Logprob] | None]]:
        """Each row's request, tokens and log-probabilities."""
        tokens, logprobs, end = self.tokens, self.logprobs, 0
        for request_id, count in zip(self.ids, self.counts or itertools.repeat(1), strict=False):
            start, end = end, end + count
            yield request_id, tokens[start:end], logprobs[start:end] if logprobs else None


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Answer to `Ping`."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot continue, or could not be loaded; the process ends after this message."""

    message: str


ToEngine: TypeAlias = Start | Submit | Try | Cancel | Ping | Shutdown
FromEngine: TypeAlias = Ready | Step | Pong | Failed

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 * 1024 * 1024
"""The most bytes of a frame. A longer frame means that the two sides are out of step."""

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

    @property
    def inside_message(self) -> bool:
        """Return whether a part of a message is kept."""
        return bool(self._buffer)

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


_MARK = "\x1e"
_MARKED = re.compile(rf'{_MARK}("(?:[^"\\]|\\.)*"){_MARK}(.*)', re.DOTALL)


def mark_of(request: str) -> str:
    """Return what the engine process prints at the beginning of a line that belongs to the request with this id.

    The server takes the mark off again for its log. Only what Python prints is marked: a library in C++ prints for one
    iteration, which serves many requests.
    """
    return f"{_MARK}{json.dumps(request)}{_MARK}" if request else ""


def split_mark(line: str) -> tuple[str, str]:
    """Return the id of the request that a printed line belongs to, "" for none, and the line without its mark."""
    if found := _MARKED.fullmatch(line):
        with contextlib.suppress(ValueError):
            return json.loads(found[1]), found[2]
    return "", line
