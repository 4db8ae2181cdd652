"""OpenAI's responses: the encoders of chats and completions, whole and streamed, and of chats with calls or reasoning.

Log-probabilities become JSON when they come, and not all together at the end of a request with many prompts and tokens.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import orjson
from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api.base import CollectedSequence, Prompt, ResponseEncoder, WholeEncoder, dump_line
from djl_trtllm.api.chat import Parsing
from djl_trtllm.api.families import error_object
from djl_trtllm.api.parts import Part, PartKind, PartsReader, json_items, json_list, token_logprobs
from djl_trtllm.request import FinishReason, OutputChunk, RankedToken, SequenceResult, Token, new_hex_id, total

FINISH_REASONS = {
    FinishReason.END_TOKEN: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    # OpenAI has no word for these; `abort` is vLLM's.
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}
_ENDS = (FinishReason.END_TOKEN, FinishReason.STOP)
"""The reasons that `tool_calls` replaces in a choice with calls."""


class Response(msgspec.Struct):
    """The response to one request: `n` sequences for each of its `generations`.

    `prefix` begins its id; clients read `fingerprint` as `system_fingerprint`. With `include_usage`, and in every event
    with `continuous_usage`, a stream has its usage. `echo`: the prompt stands before its output. `prompt_logprobs`: it
    has those of the prompt, as vLLM's. `token_ids`: it has the ids of its tokens. `tgi`: its parts have what TGI's own
    client requires. `prompts`, `prompt_ids` and `prompt_tokens` (their lengths in all) come when the prompts are
    tokenised, the others at the end of a sequence (`count`). `cached`: the least number of tokens of each prompt that
    one of its sequences had from the prefix cache.
    """

    prefix: str
    model: str
    fingerprint: str = ""
    n: int = 1
    generations: int = 1
    stream: bool = False
    logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    tgi: bool = False
    id: str = msgspec.field(default_factory=new_hex_id)
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    prompts: list[str] = msgspec.field(default_factory=list)
    prompt_ids: list[list[int]] = msgspec.field(default_factory=list)
    prompt_tokens: int = 0
    cached: dict[int, int] = msgspec.field(default_factory=dict)
    generated: int = 0
    accepted: int | None = None
    drafted: list[int | None] = msgspec.field(default_factory=list)

    def begin(self, prompt: Prompt) -> None:
        self.prompt_tokens += prompt.length
        if self.echo:
            self.prompts.append(prompt.text)
        if self.token_ids:
            self.prompt_ids.append([token.id for token in prompt.tokens])

    @property
    def detailed(self) -> bool:
        """Whether a stream shows tokens that add no text."""
        return self.logprobs or self.token_ids

    def shown_ids(self, tokens: Sequence[Token], generation: int | None = None) -> dict[str, Any]:
        """The ids of tokens, and of the prompt of a generation, as members of a choice (vLLM's)."""
        if not self.token_ids:
            return {}
        shown: dict[str, Any] = {"token_ids": [token.id for token in tokens]}
        return shown if generation is None else shown | {"prompt_token_ids": self.prompt_ids[generation]}

    def head(self, kind: str) -> dict[str, Any]:
        """The members that every object of the response begins with."""
        head = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": self.fingerprint}

    def count(self, generation: int, finished: SequenceResult) -> None:
        """Count a sequence that has ended."""
        self.cached[generation] = min(finished.cached_tokens, self.cached.get(generation, finished.cached_tokens))
        self.generated += finished.generated_tokens
        if finished.accepted_tokens is not None:
            self.accepted = (self.accepted or 0) + finished.accepted_tokens
        self.drafted.append(finished.drafted_tokens)

    def usage(self, streamed: int | None = None) -> dict[str, Any]:
        """The usage at the end, or when this number of tokens was `streamed`."""
        generated = self.generated if streamed is None else streamed
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }
        if streamed is None and self.accepted is not None:
            usage["completion_tokens_details"] = details = {"accepted_prediction_tokens": self.accepted}
            if (drafted := total(self.drafted)) is not None:
                details["rejected_prediction_tokens"] = max(0, drafted - self.accepted)
        return usage


# -- log-probabilities -------------------------------------------------------------------------------------------------

_LONGEST_GAP = 4


class LogprobsPart(NamedTuple):
    """A part of the `logprobs` of a choice, each list as JSON without its brackets.

    `end` is where its text ends, in characters of the choice's text.
    """

    tokens: bytes
    token_logprobs: bytes
    top_logprobs: bytes
    text_offset: bytes
    end: int

    @classmethod
    def of_prompt(cls, tokens: list[RankedToken], text: str) -> LogprobsPart:
        """The part of an echoed prompt."""
        offsets, end = [], 0
        for token in tokens:
            # The text may lack the first token of the prompt, and tokens that are parts of a character.
            found = text.find(token.text, end, end + len(token.text) + _LONGEST_GAP)
            offsets.append(end if found < 0 else found)
            end = end if found < 0 else found + len(token.text)
        return cls(
            json_items([token.text for token in tokens]),
            json_items([token.logprob for token in tokens]),
            json_items([None if token.logprob is None else _likeliest(token) for token in tokens]),
            json_items(offsets),
            len(text),
        )

    @classmethod
    def of_output(cls, tokens: list[Token], before: LogprobsPart | None) -> LogprobsPart:
        """The part of generated tokens, which follow the part `before` them."""
        texts, logprobs, top, offsets = completion_logprobs(tokens, 0 if before is None else before.end).values()
        if top is None and before is not None and before.top_logprobs:
            top = [{token.text: token.logprob} for token in tokens]  # what is known of each
        end = offsets[-1] + len(texts[-1])
        return cls(json_items(texts), json_items(logprobs), json_items(top or []), json_items(offsets), end)


def joined_logprobs(parts: list[LogprobsPart]) -> dict[str, orjson.Fragment | None]:
    """The `logprobs` of a choice."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    found: dict[str, orjson.Fragment | None] = {
        name: json_list(getattr(part, name) for part in parts) for name in names
    }
    return found if any(part.top_logprobs for part in parts) else found | {"top_logprobs": None}


def completion_logprobs(tokens: list[Token], offset: int) -> dict[str, Any]:
    """The `logprobs` of a choice whose first token begins at `offset`, in characters of the choice's text."""
    offsets: list[int] = []
    ranked = [token for token in tokens if isinstance(token, RankedToken)]
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{each.text: each.logprob for each in token.top} for token in ranked] if ranked else None,
        "text_offset": offsets,
    }


def vllm_prompt_logprobs(tokens: list[RankedToken]) -> orjson.Fragment:
    """A list with an object for each token, None for the first: the token and the most likely ones, by id."""
    return orjson.Fragment(orjson.dumps([None, *map(_by_id, tokens[1:])]))


def _by_id(token: RankedToken) -> dict[str, dict[str, Any]]:
    found = {str(token.id): {"logprob": token.logprob, "rank": None, "decoded_token": token.text}}
    for rank, each in enumerate(token.top, 1):
        found[str(each.id)] = {"logprob": each.logprob, "rank": rank, "decoded_token": each.text}
    return found


def _likeliest(token: RankedToken) -> dict[str, float | None]:
    """The most likely tokens and the token itself; of two with one text the more likely one."""
    found: dict[str, float | None] = {}
    for each in token.top:
        found.setdefault(each.text, each.logprob)
    found.setdefault(token.text, token.logprob)
    return found


# -- whole responses ---------------------------------------------------------------------------------------------------


class ObjectEncoder(WholeEncoder):
    """The base of the encoders of one JSON object with `choices`; those of the first prompt come first."""

    kind: str
    """The value of `object`."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.n, response.generations)
        self.response = response
        self.wants_prompt_tokens = response.token_ids
        self._prompt_logprobs: dict[int, orjson.Fragment] = {}

    def begin(self, prompt: Prompt) -> None:
        self.response.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        if chunk.prompt is not None:
            self.take_prompt(chunk.generation, chunk.prompt)
        failed = chunk.finished is not None and chunk.finished.error is not None
        if self.response.logprobs and chunk.tokens and not failed:
            # A token with 20 alternatives takes 40 µs: they are not left to the end, nor kept until then.
            self.take_logprobs(chunk.generation * self.response.n + chunk.index, chunk.tokens)
            plain = [Token(each.id, each.text, each.logprob, each.special) for each in chunk.tokens]
            chunk = replace(chunk, tokens=plain)
        return super().encode(chunk)

    def take_prompt(self, generation: int, tokens: list[RankedToken]) -> None:
        """The log-probabilities of a generation's prompt have come."""
        if self.response.prompt_logprobs:
            self._prompt_logprobs[generation] = vllm_prompt_logprobs(tokens)

    @abstractmethod
    def take_logprobs(self, index: int, tokens: list[Token]) -> None:
        """Tokens of a choice have come, whose log-probabilities the response has."""

    def _body(self) -> bytes:
        choices: list[dict[str, Any]] = []
        for index, sequence in enumerate(self._output.sequences):
            assert sequence.finished is not None
            self.response.count(index // self.response.n, sequence.finished)
            choices.append(self.choice(index, sequence, sequence.finished))
        whole = self.response.head(self.kind) | {"choices": choices, "usage": self.response.usage()}
        return orjson.dumps(whole | self.more())

    @abstractmethod
    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        """One of `choices`."""

    def more(self) -> dict[str, Any]:
        """Members of the response beside `choices`."""
        return {}


class ChatEncoder(ObjectEncoder):
    """One `chat.completion`."""

    kind = "chat.completion"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self._logprobs: list[list[bytes]] = [[] for _ in range(response.n)]

    def take_logprobs(self, index: int, tokens: list[Token]) -> None:
        self._logprobs[index].append(json_items(token_logprobs(tokens)))

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": _chat_logprobs(json_list(self._logprobs[index])) if self.response.logprobs else None,
            "finish_reason": FINISH_REASONS[finished.reason],
            **self.response.shown_ids(sequence.tokens),
        }

    def more(self) -> dict[str, Any]:
        response = self.response
        more: dict[str, Any] = {"prompt_token_ids": response.prompt_ids[0]} if response.token_ids else {}
        return more | {"prompt_logprobs": self._prompt_logprobs[0]} if response.prompt_logprobs else more


class ParsedChatEncoder(ChatEncoder):
    """One `chat.completion`, with the tool calls and the reasoning that its text has: it is parsed as it comes."""

    def __init__(self, response: Response, parsing: Parsing) -> None:
        super().__init__(response)
        self._parsing = parsing
        self._readers: list[PartsReader] = []

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._readers = [PartsReader(self._parsing, prompt.text) for _ in range(self.response.n)]

    def encode(self, chunk: OutputChunk) -> bytes:
        text = "".join([token.text for token in chunk.tokens])
        for _ in self._readers[chunk.index].read(text, end=chunk.finished is not None):
            pass
        return super().encode(chunk)

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        reader, choice = self._readers[index], super().choice(index, sequence, finished)
        choice["message"] |= _of_parts(reader.parts)
        return choice | {"finish_reason": _reason(reader, finished)}


def _of_parts(parts: list[Part]) -> dict[str, Any]:
    """The members of a message that its parts make."""
    text, thought, calls = ([part for part in parts if part.kind is kind] for kind in _IN_A_MESSAGE)
    members: dict[str, Any] = {"content": None if calls and not text else "".join([part.text for part in text])}
    if thought:
        members["reasoning_content"] = "".join([part.text for part in thought])
    return members | {"tool_calls": [_call(part, part.text) for part in calls]} if calls else members


_IN_A_MESSAGE = (PartKind.TEXT, PartKind.REASONING, PartKind.CALL)


class CompletionEncoder(ObjectEncoder):
    """One `text_completion`."""

    kind = "text_completion"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self._logprobs: list[list[LogprobsPart]] = [[] for _ in range(response.n * response.generations)]

    def take_prompt(self, generation: int, tokens: list[RankedToken]) -> None:
        super().take_prompt(generation, tokens)
        if self.response.echo:
            part, n = LogprobsPart.of_prompt(tokens, self.response.prompts[generation]), self.response.n
            self._logprobs[generation * n : (generation + 1) * n] = [[part] for _ in range(n)]

    def take_logprobs(self, index: int, tokens: list[Token]) -> None:
        parts = self._logprobs[index]
        parts.append(LogprobsPart.of_output(tokens, parts[-1] if parts else None))

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        generation = index // self.response.n
        echoed = self.response.prompts[generation] if self.response.echo else ""
        choice = {
            "index": index,
            "text": echoed + sequence.text,
            "logprobs": joined_logprobs(self._logprobs[index]) if self.response.logprobs else None,
            "finish_reason": FINISH_REASONS[finished.reason],
            **self.response.shown_ids(sequence.tokens, generation),
        }
        if self.response.prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs[generation]
        return choice


def _chat_logprobs(tokens: object) -> dict[str, Any]:
    return {"content": tokens, "refusal": None}


def _call(part: Part, arguments: str) -> dict[str, Any]:
    return {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": arguments}}


def _reason(reader: PartsReader, finished: SequenceResult) -> str:
    return "tool_calls" if reader.calls and finished.reason in _ENDS else FINISH_REASONS[finished.reason]


# -- streams -----------------------------------------------------------------------------------------------------------

_USAGE = b"\0"
"""Marks the place of the usage in an event. JSON has no such byte."""
_DONE = b"data: [DONE]\n\n"


class EventEncoder(ResponseEncoder):
    """The base of the encoders of streams: events with one choice each, and `[DONE]`."""

    stream = True
    content_type = "text/event-stream"
    kind: str
    """The value of `object`."""

    def __init__(self, response: Response, member: bytes) -> None:
        """`member` of a choice has its text, in the place of `%b`."""
        self.response = response
        self.wants_prompt_tokens = response.token_ids
        # With `include_usage`, every chunk but the last has a `usage` of null, or its own.
        self._counts = response.include_usage and response.continuous_usage
        usage = b',"usage":' + (_USAGE if self._counts else b"null") if response.include_usage else b""
        self._before = b"data: " + orjson.dumps(response.head(self.kind))[:-1] + b',"choices":['
        self._after = b"]" + usage + b"}\n\n"
        self._running = response.n * response.generations
        self._begun = [False] * self._running
        self._streamed = 0
        self._failed = False
        # The hot path: only the text differs.
        before, after = self._before.replace(b"%", b"%%"), b',"logprobs":null,"finish_reason":null}' + self._after
        self._texts = [before + b'{"index":%d,' % index + member + after for index in range(self._running)]

    def begin(self, prompt: Prompt) -> None:
        self.response.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        if self._failed:
            return b""
        index, finished = chunk.generation * self.response.n + chunk.index, chunk.finished
        if finished is None:
            data = self.events(index, chunk.tokens, None)
            return self._counted(data, chunk) if self._counts else data
        if finished.error is not None:
            return self._counted(self.events(index, chunk.tokens, None), chunk) + self.error(finished.error)
        self.response.count(chunk.generation, finished)
        data = self._counted(self.events(index, chunk.tokens, finished), chunk)
        self._running -= 1
        return data if self._running else data + self._end()

    def error(self, error: errors.RequestError) -> bytes:
        """An event with the error, which OpenAI's clients raise."""
        self._failed = True  # the other choices end too
        return b"data: " + dump_line({"error": error_object(str(error), error)}) + b"\n\n" + _DONE

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """The events of a choice for its new tokens, and for its end.

        Tokens without a text add nothing, unless their log-probabilities or ids are wanted.
        """
        events = b"" if self._begun[index] else self.first(index)
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        if self.response.detailed and tokens:
            events += self.detailed(index, text, tokens)
        elif text:
            events += self._texts[index] % dump_line(text)
        return events if finished is None else events + self.last(index, FINISH_REASONS[finished.reason])

    @abstractmethod
    def first(self, index: int) -> bytes:
        """The event that a choice begins with. Called once for each."""

    @abstractmethod
    def detailed(self, index: int, text: str, tokens: list[Token]) -> bytes:
        """The event of tokens with their log-probabilities or ids."""

    @abstractmethod
    def last(self, index: int, reason: str) -> bytes:
        """The event that a choice ends with."""

    def _event(self, choice: dict[str, Any], more: bytes = b"") -> bytes:
        """An object with this choice; `more` has its further members, each behind a comma."""
        return self._before + dump_line(choice) + b"]" + more + self._after[1:]

    def _counted(self, data: bytes, chunk: OutputChunk) -> bytes:
        """The events with the usage so far, if each event has one."""
        if not self._counts:
            return data
        self._streamed += len(chunk.tokens)
        return data.replace(_USAGE, dump_line(self.response.usage(self._streamed)))

    def _end(self) -> bytes:
        if not self.response.include_usage:
            return _DONE
        return b'%b],"usage":%b}\n\n%b' % (self._before, dump_line(self.response.usage()), _DONE)


_TGI = b'"role":"assistant","tool_calls":null,'
"""The members of every delta that TGI's own client requires, before the content."""


class ChatStreamEncoder(EventEncoder):
    """`chat.completion.chunk`s. Each choice begins with an empty chunk that has its role."""

    kind = "chat.completion.chunk"

    def __init__(self, response: Response) -> None:
        super().__init__(response, b'"delta":{' + (_TGI if response.tgi else b"") + b'"content":%b}')

    def first(self, index: int) -> bytes:
        self._begun[index] = True
        ids = self.response.prompt_ids
        more = b',"prompt_token_ids":' + dump_line(ids[0]) if self.response.token_ids else b""
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None}, more=more)

    def detailed(self, index: int, text: str, tokens: list[Token]) -> bytes:
        return self._delta(index, {"content": text}, tokens)

    def last(self, index: int, reason: str) -> bytes:
        return self._delta(index, {}, reason=reason)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Sequence[Token] = (),
        reason: str | None = None,
        more: bytes = b"",
    ) -> bytes:
        shown = _chat_logprobs(token_logprobs(tokens)) if tokens and self.response.logprobs else None
        if self.response.tgi:
            delta = {"role": "assistant", "content": None, "tool_calls": None} | delta
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return self._event(choice | self.response.shown_ids(tokens), more)


class ParsedChatStreamEncoder(ChatStreamEncoder):
    """`chat.completion.chunk`s, with tool calls and reasoning as they are found in the text."""

    def __init__(self, response: Response, parsing: Parsing) -> None:
        super().__init__(response)
        self._parsing = parsing
        self._readers: list[PartsReader] = []
        # The hot path, as without a parser.
        thoughts = [each.replace(b'"content":%b', b'"reasoning_content":%b') for each in self._texts]
        self._hot = {PartKind.TEXT: self._texts, PartKind.REASONING: thoughts}

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._readers = [PartsReader(self._parsing, prompt.text) for _ in range(self.response.n)]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Log-probabilities are in the first event of their tokens."""
        events = b"" if self._begun[index] else self.first(index)
        reader, deltas = self._readers[index], self._deltas(index, tokens, end=finished is not None)
        if self.response.detailed and tokens:
            events += self._delta(index, _shown(*deltas.pop(0)) if deltas else {"content": ""}, tokens)
        for part, pieces in deltas:
            hot = self._hot.get(part.kind)
            if hot is not None:
                events += hot[index] % dump_line(pieces[0] if len(pieces) == 1 else "".join(pieces))
            else:
                events += self._delta(index, _shown(part, pieces))
        return events if finished is None else events + self.last(index, _reason(reader, finished))

    def _deltas(self, index: int, tokens: list[Token], *, end: bool) -> list[tuple[Part, list[str]]]:
        """The parts to which tokens add something, each with the new pieces of its text; a call begins without any."""
        deltas: list[tuple[Part, list[str]]] = []
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        for part, piece in self._readers[index].read(text, end=end):
            if not part.pieces:
                if part.kind is PartKind.CALL:
                    deltas.append((part, []))
            elif deltas and deltas[-1][0] is part and deltas[-1][1]:
                deltas[-1][1].append(piece)
            else:
                deltas.append((part, [piece]))
        return deltas


def _shown(part: Part, pieces: list[str]) -> dict[str, Any]:
    """A delta of a part."""
    text = "".join(pieces)
    if part.kind is PartKind.CALL:
        call = {"function": {"arguments": text}} if pieces else _call(part, "")
        return {"tool_calls": [{"index": part.call, **call}]}
    return {"content" if part.kind is PartKind.TEXT else "reasoning_content": text}


class CompletionStreamEncoder(EventEncoder):
    """`text_completion`s with new text. With `echo`, a choice begins with its prompt."""

    kind = "text_completion"

    def __init__(self, response: Response) -> None:
        super().__init__(response, b'"text":%b')
        self._offsets = [0] * self._running
        self._has_ids = [False] * self._running

    def first(self, index: int) -> bytes:
        self._begun[index] = True
        echo, generation = self.response.echo, index // self.response.n
        return self._texts[index] % dump_line(self.response.prompts[generation]) if echo else b""

    def detailed(self, index: int, text: str, tokens: list[Token]) -> bytes:
        offset = self._offsets[index]
        self._offsets[index] += len(text)
        return self._choice(
            index, text, tokens, completion_logprobs(tokens, offset) if self.response.logprobs else None
        )

    def last(self, index: int, reason: str) -> bytes:
        return self._choice(index, "", reason=reason)

    def _choice(
        self, index: int, text: str, tokens: Sequence[Token] = (), logprobs: Any = None, reason: str | None = None
    ) -> bytes:
        generation = None if self._has_ids[index] else index // self.response.n
        self._has_ids[index] = True
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._event(choice | self.response.shown_ids(tokens, generation))
