"""The output of a request: token ids become text, stop strings end it, and chunks reach its consumer."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import tokenizers
from msgspec.structs import replace
from packaging.version import Version
from tokenizers.decoders import DecodeStream

from djl_trtllm.batching.statistics import RequestRecord
from djl_trtllm.errors import GenerationError, RequestError
from djl_trtllm.executor.protocol import Logprob, Ranked
from djl_trtllm.model import TokenTexts
from djl_trtllm.request import (
    Alternative,
    Consumer,
    FinishReason,
    OutputChunk,
    RankedToken,
    Sampling,
    SequenceResult,
    ThinkingBudget,
    Token,
    begins_with_reasoning,
    total,
)

_CONTEXT = 6
"""Prompt tokens that the decoder sees, so that it knows whether the first token begins with a space."""
_STREAM_TAKES_IDS = Version(tokenizers.__version__) >= Version("0.22")
_CUT_SHORT = (FinishReason.CANCELLED, FinishReason.ERROR)


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces, also where they cross the borders of tokens.

    After each piece, all characters before `safe` may be shown: no stop string can begin there. The stop string that
    begins first wins; of several at one place, the longest.
    """

    __slots__ = ("_buffer", "_longest", "_offset", "_stops", "safe")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops))
        self._buffer = ""
        self._offset = 0
        self.safe = 0

    def feed(self, text: str) -> str | None:
        """Take in the next piece, and return the stop string that it completes; it begins at `safe`."""
        self._buffer += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._buffer.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)
            self.safe = self._offset + at
            return stop
        held = self._possible_start()
        self.safe = self._offset = self._offset + held
        self._buffer = self._buffer[held:]
        return None

    @property
    def pending(self) -> bool:
        """Whether the text ends with what may be the beginning of a stop string."""
        return bool(self._buffer)

    def _possible_start(self) -> int:
        """The beginning of the longest end of the buffer that could grow into a stop string."""
        length = len(self._buffer)
        for start in range(max(0, length - self._longest + 1), length):
            tail = self._buffer[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return length


class ThinkingMeter:
    """Counts the tokens of one sequence's reasoning.

    `prompt`: the end of the prompt's text. `closing_ids`: what ends the reasoning when its budget is spent. `most`: the
    most tokens that the sequence may have after `closing_ids`.
    """

    __slots__ = ("_anywhere", "_closers", "_inside", "_left", "_matcher", "_opener", "closing_ids", "latest")

    def __init__(self, budget: ThinkingBudget, prompt: str, closing_ids: Sequence[int], most: int) -> None:
        self.closing_ids = closing_ids
        self.latest = most - len(closing_ids)
        """The tokens beyond which a sequence has no room for the end of the reasoning."""
        self._left = budget.tokens
        self._opener = budget.opener
        self._closers = budget.closers
        self._anywhere = budget.anywhere
        self._inside = begins_with_reasoning(prompt, budget.opener, budget.closers[0], starts=budget.starts)
        self._matcher: StopMatcher | None = StopMatcher(self._closers if self._inside else (budget.opener,))
        """None once no reasoning can follow."""

    def spend(self, text: str) -> bool:
        """Take in the text of the next token. True if the reasoning has to end behind it, see `close`."""
        matcher = self._matcher
        if matcher is None:
            return False
        found = matcher.feed(text)
        if self._inside:
            self._left -= 1
            if found is not None:
                self.close()
            return found is None and self._left <= 0 and not matcher.pending
        if found is not None:
            self._inside, self._matcher = True, StopMatcher(self._closers)
        elif not self._anywhere and text.strip() and not matcher.pending:
            self._matcher = None
        return False

    def close(self) -> None:
        """Note that the reasoning has ended."""
        self._inside = False
        self._matcher = StopMatcher((self._opener,)) if self._anywhere else None


class Detokenizer:
    """Decodes one sequence. Joining what `step` and `flush` return gives what decoding all its tokens at once would
    add to the prompt's text. Special tokens have no text and are left out.

    Most tokens are looked up in `texts`, in a tenth of the time. The library decodes those that make a character only
    together, and the first one where the prompt's last token does not show what it follows.
    """

    __slots__ = ("_begun", "_context", "_emitted", "_ids", "_stream", "_texts", "_tokenizer", "pending")

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int]) -> None:
        self._texts = texts
        self._tokenizer = texts.raw
        self.pending = False
        """Whether the last token ended inside a character."""
        self._stream: DecodeStream | None
        """None after a token that was looked up."""
        self._begin(list(prompt_ids[-_CONTEXT:]))
        self._begun = bool(self._context) and texts[self._context[-1]] is not None
        """Whether the next token follows a text, of the prompt or of what has been returned."""

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes: "" while a character is unfinished."""
        self._ids.append(token_id)
        if self._begun and not self.pending:
            known = self._texts[token_id]
            if known is not None:
                self._stream = None
                return known
        return self._decoded(token_id)

    def _decoded(self, token_id: int) -> str:
        stream = self._stream
        if stream is None:
            self._begin((self._context + self._ids[-_CONTEXT - 1 : -1])[-_CONTEXT:])
            self._ids.append(token_id)
        try:
            if stream is None:
                stream = self._stream = self._open_stream()
            text: str | None = stream.step(self._tokenizer, token_id)
        except Exception:  # the Rust library raises bare Exception
            self.pending = False
            return self._restart()
        self.pending = text is None
        if text is None:
            return ""
        self._begun = True
        self._emitted += len(text)
        return text

    def _open_stream(self) -> DecodeStream:
        if _STREAM_TAKES_IDS:
            return DecodeStream(ids=self._context, skip_special_tokens=True)
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in self._context:
            stream.step(self._tokenizer, token_id)
        return stream

    def flush(self) -> str:
        """Return the text held back at the end of the sequence: replacement characters for unfinished ones."""
        if not self.pending:
            return ""
        self.pending = False
        before, whole = self._decode(self._context), self._decode(self._context + self._ids)
        return whole[len(before) + self._emitted :]

    def _begin(self, context: list[int]) -> None:
        """Decode what follows `context`."""
        self._context = context
        self._ids: list[int] = []
        self._emitted = 0
        self._stream = None

    def _restart(self) -> str:
        """Go on after the decoder took back text that has been handed out, as byte-fallback decoders do when a byte
        turns out to be invalid: return the last token's text as it follows its predecessor."""
        last_two = (self._context + self._ids[-2:])[-2:]
        before, text = self._decode(last_two[:1]), self._decode(last_two)
        self._begin(last_two[1:])
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)  # without special tokens
        return text


class OutputSequence(msgspec.Struct, eq=False, kw_only=True):
    """The output of one sequence.

    `take` turns token ids into tokens with text, and holds back those whose character is unfinished or whose text may
    belong to a stop string; `finish` ends it; `drain` returns the new output. A token that a stop string swallows keeps
    its place with the text before it, so as many tokens come out as `token_ids` has, and their texts always join to
    the output.
    """

    index: int
    texts: TokenTexts
    special_ids: frozenset[int]
    shown: Mapping[int, str]
    """The texts of those special tokens that are part of the output."""
    prompt_ids: Sequence[int]
    stop: Sequence[str]
    stop_ids: Mapping[int, FinishReason]
    """Ids that end the sequence here, each with its reason: those that the engine does not stop at."""
    seed: int | None
    logprobs: bool
    token_ids: list[int] = msgspec.field(default_factory=list)
    """All ids that were generated so far."""
    counted: int = 0
    """The number of tokens that the statistics have counted; the last of them came at `last_token_at`."""
    last_token_at: float | None = None
    accepted: int | None = None
    """Tokens that a draft proposed and the model took; None where the engine has not said so."""
    drafted: int | None = None
    """Tokens that drafts proposed; None where the engine has not counted them from beginning to end."""
    dropped: int = 0
    """Tokens that came behind its end, and that `accepted` does not take into account yet."""
    cumulative_logprob: float = 0.0
    finished: SequenceResult | None = None
    cached_tokens: int = 0
    closed: bool = False
    """Whether the end has been delivered."""
    thinking: ThinkingMeter | None = None
    """None where the reasoning has no budget."""
    stale: bool = False
    """Whether the sequence goes on after tokens that the engine has not generated: tokens that still come are
    dropped."""
    _detokenizer: Detokenizer | None = None
    """The decoder; None, as `_matcher` is, until the first token."""
    _matcher: StopMatcher | None = None
    _ready: list[Token] = msgspec.field(default_factory=list)
    _held: list[tuple[int, Token]] = msgspec.field(default_factory=list)
    """Tokens that wait for a possible stop string to resolve, with the offset where each one's text begins."""
    _text_end: int = 0

    def take(self, token_id: int, logprob: Any = None) -> bool:
        """Append a token, with its log-probability if it has one. False if it takes no more from the present engine
        request: a stop string or stop id ended the sequence, or its reasoning was ended (`stale`)."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            detokenizer = self._detokenizer = Detokenizer(self.texts, self.prompt_ids)
            self._matcher = StopMatcher(self.stop) if self.stop else None
        self.token_ids.append(token_id)
        if logprob is not None:
            self.cumulative_logprob += logprob
        if token_id in self.special_ids:
            token = Token(token_id, self.shown.get(token_id, ""), logprob, True)
        else:
            token = Token(token_id, detokenizer.step(token_id), logprob, False)
        if self._matcher is None and not detokenizer.pending and not self._held:
            self._ready.append(token)
        elif self._hold(token, unfinished=detokenizer.pending):
            return False
        if token_id in self.stop_ids:
            self.finish(self.stop_ids[token_id])
            return False
        meter = self.thinking
        if meter is None or not meter.spend(token.text) or detokenizer.pending or len(self.token_ids) > meter.latest:
            return True
        self._end_reasoning(meter)
        return False

    def _end_reasoning(self, meter: ThinkingMeter) -> None:
        meter.close()
        self.stale = True
        for token_id in meter.closing_ids:
            if not self.take(token_id, 0.0 if self.logprobs else None):  # it is certain
                break

    def finish(self, reason: FinishReason, error: RequestError | None = None) -> None:
        """End the sequence and release the text that was held back."""
        detokenizer = self._detokenizer
        tail = detokenizer.flush() if detokenizer is not None and detokenizer.pending else ""
        if self._held:
            self._ready += [token for _, token in self._held]
        if tail:
            # A character is unfinished, so at least the token that began it is still here.
            last = max(at for at, token in enumerate(self._ready) if not token.special)
            self._ready[last] = replace(self._ready[last], text=self._ready[last].text + tail)
        self._end(reason, None, error)

    def drain(self) -> OutputChunk:
        tokens, self._ready = self._ready, []
        return OutputChunk(self.index, tokens, self.finished)

    def _hold(self, token: Token, *, unfinished: bool) -> bool:
        """Hold a token back, and release those that are safe now. True if a stop string is complete.

        `unfinished`: it ends inside a character.
        """
        self._held.append((self._text_end, token))
        self._text_end += len(token.text)
        safe = self._text_end
        if self._matcher is not None:
            stop = self._matcher.feed(token.text)
            safe = self._matcher.safe
            if stop is not None:
                self._ready += [replace(held, text=held.text[: max(0, safe - start)]) for start, held in self._held]
                self._end(FinishReason.STOP, stop, None)
                return True
        if not unfinished:
            while self._held and self._held[0][0] + len(self._held[0][1].text) <= safe:
                self._ready.append(self._held.pop(0)[1])
        return False

    def _end(self, reason: FinishReason, stop: str | None, error: RequestError | None) -> None:
        logprob = self.cumulative_logprob if self.logprobs else None
        self.finished = SequenceResult(reason, len(self.token_ids), logprob, self.seed, stop, error)


class RankedSequence(OutputSequence, eq=False, kw_only=True):
    """A sequence whose tokens come with the most likely tokens at their positions.

    `text_of` is the text of a token id in the middle of a text.
    """

    text_of: Callable[[int], str]
    _ranked: deque[Logprob] = msgspec.field(default_factory=deque)
    """The engine's entry for each token that is not delivered yet, in their order."""

    def take(self, token_id: int, logprob: Any = None) -> bool:
        self._ranked.append(logprob)
        return super().take(token_id, logprob.logprob if isinstance(logprob, Ranked) else logprob)

    def drain(self) -> OutputChunk:
        chunk = super().drain()
        tokens: list[Token] = [self._with_rank(token, self._ranked.popleft()) for token in chunk.tokens]
        return OutputChunk(chunk.index, tokens, chunk.finished)

    def _with_rank(self, token: Token, entry: Logprob) -> RankedToken:
        top: list[Alternative] = []
        if isinstance(entry, Ranked):
            top = [
                Alternative(id_, token.text if id_ == token.id else self.text_of(id_), logprob)
                for id_, logprob in zip(entry.ids, entry.logprobs, strict=True)
            ]
        return RankedToken(token.id, token.text, token.logprob, token.special, top)


class UnwrittenSequence(OutputSequence, eq=False, kw_only=True):
    """The sequence of a request that wants its prompt only, although engines generate at least one token."""

    def take(self, token_id: int, logprob: Any = None) -> bool:
        return True

    def finish(self, reason: FinishReason, error: RequestError | None = None) -> None:
        super().finish(reason if reason in _CUT_SHORT else FinishReason.LENGTH, error)


class PooledSequence(UnwrittenSequence, eq=False, kw_only=True):
    """The sequence of a request that wants its prompt's vector, and no tokens."""

    vector: bytes = b""

    def finish(self, reason: FinishReason, error: RequestError | None = None) -> None:
        if reason not in _CUT_SHORT and not self.vector:
            reason, error = FinishReason.ERROR, GenerationError("the engine ended the request without its vector")
        super().finish(reason, error)

    def drain(self) -> OutputChunk:
        return OutputChunk(self.index, [], self.finished, vector=self.vector)


class RequestState:
    """A request in the rolling batch, from `RollingBatch.submit` to its end.

    Its consumer gets each sequence's chunks in order. The last one of each has its `SequenceResult`, however it ended.
    With `best_of` or beams, everything is delivered at the end, the best sequences first.
    """

    def __init__(
        self,
        sampling: Sampling,
        sequences: list[OutputSequence],
        consumer: Consumer,
        record: RequestRecord,
    ) -> None:
        self.sequences = sequences
        self.ids: list[int] = []
        """The executor's ids of the sequences."""
        self.digest = ""
        """The request's `blame.digest`; computed when it is wanted."""
        self.record = record
        self.prompt: list[RankedToken] | None = None
        """The prompt's tokens with their log-probabilities, until they are delivered."""
        self.scored = False
        """Whether they have come: another engine process does not compute them again."""
        self._consumer = consumer
        self._beams = sampling.beam_width > 1
        self._ranked = sampling.n if sampling.best_of is not None or self._beams else None
        self._unfinished = len(sequences)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self._unfinished

    @property
    def result(self) -> SequenceResult:
        """How the request ended, once it is done: as the sequence that ended worst."""
        return max([each.finished for each in self.sequences if each.finished], key=attrgetter("reason"))

    def deliver(self, sequence: OutputSequence) -> None:
        """Give the consumer the new output of a sequence that is not closed; ranking holds it back to the end."""
        consumer = self._consumer
        if sequence.finished is not None:
            started = self.record.started
            if started is not None:
                sequence.finished = replace(
                    sequence.finished,
                    queue_seconds=started - self.record.arrived,
                    reseeded=self.record.reseeded,
                    accepted_tokens=sequence.accepted,
                    cached_tokens=sequence.cached_tokens,
                    drafted_tokens=sequence.drafted,
                )
            sequence.closed = True
            self._unfinished -= 1
            if not self._unfinished:
                self.record.drafted_tokens = total(map(attrgetter("drafted"), self.sequences))
                # It refers to what refers to this request: both would stay until the garbage collector looks at all.
                self.abandon()
        if self.prompt is not None:
            prompt, self.prompt = self.prompt, None
            consumer(OutputChunk(0, [], None, prompt=prompt))
        if self._ranked is not None:
            if self.done:
                self._deliver_ranked(consumer, self._ranked)
            return
        chunk = sequence.drain()
        if chunk.tokens or chunk.finished is not None:
            consumer(chunk)

    def abandon(self) -> None:
        self._consumer = _ignore

    def _deliver_ranked(self, consumer: Consumer, n: int) -> None:
        # The engine gives beams in their order.
        best = self.sequences if self._beams else sorted(self.sequences, key=_rank, reverse=True)
        for index, sequence in enumerate(best[:n]):
            sequence.index = index
            consumer(sequence.drain())


def _rank(sequence: OutputSequence) -> tuple[bool, float]:
    """Ranks a sequence that was cut short below complete ones, although its log-probability is higher."""
    assert sequence.finished is not None
    return sequence.finished.reason not in _CUT_SHORT, sequence.cumulative_logprob


def _ignore(chunk: OutputChunk) -> None:
    pass
