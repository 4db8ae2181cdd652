"""OpenAI's responses: errors, and the encoders of chats and completions, whole and streamed.

At the end, the encoders of outputs that may have calls or reasoning.

Log-probabilities become JSON when they come, and not all together at the end of a request with many prompts and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from djl_trtllm import errors
from djl_trtllm.api import choices
from djl_trtllm.api import output_parsers as parsers
from djl_trtllm.api.base import CollectedSequence, Prompt, dump_line
from djl_trtllm.api.chat import Parsing, ToolUse
from djl_trtllm.api.choices import Response, json_items, json_list
from djl_trtllm.request import FinishReason, OutputChunk, RankedToken, SequenceResult, Token

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


FINISH_REASONS = {
    FinishReason.END_TOKEN: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    # OpenAI has no word for these; `abort` is vLLM's.
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


class EventEncoder(choices.EventEncoder):
    """The base of the encoders of streams."""

    def failure(self, error: errors.RequestError) -> bytes:
        """An event with the error, which OpenAI's clients raise."""
        return b"data: " + dump_line({"error": choices.error_object(str(error), error)}) + b"\n\n"


class ChatEncoder(choices.ObjectEncoder):
    """One `chat.completion`."""

    kind = "chat.completion"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self._logprobs: list[list[bytes]] = [[] for _ in range(response.n)]

    def take_prompt(self, generation: int, tokens: list[RankedToken]) -> None:
        self._prompt_logprobs = vllm_prompt_logprobs(tokens)

    def take_logprobs(self, index: int, tokens: list[Token]) -> None:
        self._logprobs[index].append(choices.json_items(choices.token_logprobs(tokens)))

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": _chat_logprobs(choices.json_list(self._logprobs[index])) if self.response.logprobs else None,
            "finish_reason": FINISH_REASONS[finished.reason],
            **self.response.shown_ids(sequence.tokens),
        }

    def more(self) -> dict[str, Any]:
        response = self.response
        more: dict[str, Any] = {"prompt_token_ids": response.prompt_ids[0]} if response.token_ids else {}
        return more | {"prompt_logprobs": self._prompt_logprobs} if response.prompt_logprobs else more


class ChatStreamEncoder(EventEncoder):
    """`chat.completion.chunk`s. Each choice begins with an empty chunk that has its role."""

    kind = "chat.completion.chunk"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self._begun = [False] * response.n
        # The hot path: only the content differs.
        self._content = [
            b'%b{"index":%d,"delta":{%b"content":%%b},"logprobs":null,"finish_reason":null}%b'
            % (self._before.replace(b"%", b"%%"), index, _TGI if response.tgi else b"", self._after)
            for index in range(response.n)
        ]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Tokens without a text add nothing, unless their log-probabilities are wanted."""
        events = b"" if self._begun[index] else self.first(index)
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        if self.response.detailed and tokens:
            events += self._delta(index, {"content": text}, tokens)
        elif text:
            events += self._content[index] % dump_line(text)
        if finished is not None:
            events += self._delta(index, {}, reason=FINISH_REASONS[finished.reason])
        return events

    def first(self, index: int) -> bytes:
        """The event that a choice begins with, b"" if it has begun."""
        if self._begun[index]:
            return b""
        self._begun[index] = True
        more = b""
        if self.response.token_ids:
            more = b',"prompt_token_ids":' + dump_line(self.response.prompt_ids[0])
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None}, more=more)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Sequence[Token] = (),
        reason: str | None = None,
        more: bytes = b"",
    ) -> bytes:
        shown = _chat_logprobs(choices.token_logprobs(tokens)) if tokens and self.response.logprobs else None
        if self.response.tgi:
            delta = {"role": "assistant", "content": None, "tool_calls": None} | delta
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return self._event(choice | self.response.shown_ids(tokens), more)


_TGI = b'"role":"assistant","tool_calls":null,'
"""What TGI's own client requires in every delta, before the content."""


def _chat_logprobs(tokens: object) -> dict[str, Any]:
    return {"content": tokens, "refusal": None}


class CompletionEncoder(choices.ObjectEncoder):
    """One `text_completion`. The choices of the first prompt come first."""

    kind = "text_completion"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self._prompt_logprobs: dict[int, orjson.Fragment] = {}
        self._logprobs: list[list[LogprobsPart]] = [[] for _ in range(response.n * response.generations)]

    def take_prompt(self, generation: int, tokens: list[RankedToken]) -> None:
        if self.response.prompt_logprobs:
            self._prompt_logprobs[generation] = vllm_prompt_logprobs(tokens)
        if self.response.echo:
            part, n = LogprobsPart.of_prompt(tokens, self.response.prompts[generation]), self.response.n
            self._logprobs[generation * n : (generation + 1) * n] = [[part] for _ in range(n)]

    def take_logprobs(self, index: int, tokens: list[Token]) -> None:
        parts = self._logprobs[index]
        parts.append(LogprobsPart.of_output(tokens, parts[-1] if parts else None))

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        response, generation = self.response, index // self.response.n
        echoed = response.prompts[generation] if response.echo else ""
        choice = {
            "index": index,
            "text": echoed + sequence.text,
            "logprobs": joined_logprobs(self._logprobs[index]) if response.logprobs else None,
            "finish_reason": FINISH_REASONS[finished.reason],
            **self.response.shown_ids(sequence.tokens, generation),
        }
        if response.prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs[generation]
        return choice


class CompletionStreamEncoder(EventEncoder):
    """`text_completion`s with new text. With `echo`, a choice begins with its prompt."""

    kind = "text_completion"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        count = response.n * response.generations
        self._echoed = [not response.echo] * count
        self._offsets = [0] * count
        self._begun = [False] * count
        self._text = [
            b'%b{"index":%d,"text":%%b,"logprobs":null,"finish_reason":null}%b'
            % (self._before.replace(b"%", b"%%"), index, self._after)
            for index in range(count)
        ]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Tokens without a text add nothing, unless their log-probabilities are wanted."""
        events = b""
        if not self._echoed[index]:
            self._echoed[index] = True
            events = self._text[index] % dump_line(self.response.prompts[index // self.response.n])
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        if self.response.detailed and tokens:
            events += self._choice(index, text, tokens)
            self._offsets[index] += len(text)
        elif text:
            events += self._text[index] % dump_line(text)
        if finished is not None:
            events += self._choice(index, "", reason=FINISH_REASONS[finished.reason])
        return events

    def _choice(self, index: int, text: str, tokens: list[Token] | None = None, reason: str | None = None) -> bytes:
        logprobs = tokens is not None and self.response.logprobs
        shown = completion_logprobs(tokens or [], self._offsets[index]) if logprobs else None
        generation = None if self._begun[index] else index // self.response.n
        self._begun[index] = True
        choice = {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}
        return self._event(choice | self.response.shown_ids(tokens or [], generation))


_ENDS = (FinishReason.END_TOKEN, FinishReason.STOP)


@dataclass(slots=True)
class ParsedChoice:
    """One sequence: what was found in it becomes deltas of OpenAI's stream."""

    parser: parsers.OutputParser
    tools: ToolUse | None
    calls: int = 0
    _dropped: bool = field(default=False)

    @classmethod
    def of(cls, parsing: Parsing, prompt: str) -> ParsedChoice:
        """A sequence of a request with this parsing, after this prompt."""
        return cls(parsing.parser(prompt), parsing.tools)

    def deltas(self, text: str, *, end: bool) -> list[dict[str, Any]]:
        """The deltas of more text, and of its end. Events of one kind that follow each other are one delta."""
        events = self.parser.feed(text) if text else []
        if end:
            events += self.parser.finish()
        deltas: list[dict[str, Any]] = []
        for event in events:
            delta = self._delta(event)
            if delta is not None and not (deltas and _join(deltas[-1], delta)):
                deltas.append(delta)
        return deltas

    def reason(self, finished: SequenceResult) -> str:
        return "tool_calls" if self.calls and finished.reason in _ENDS else FINISH_REASONS[finished.reason]

    def _delta(self, event: parsers.Event) -> dict[str, Any] | None:
        match event:
            case parsers.Content(text):
                return {"content": text}
            case parsers.Reasoning(text):
                return {"reasoning_content": text}
            case parsers.CallStart(name):
                assert self.tools is not None
                self._dropped = self.calls > 0 and not self.tools.parallel
                if self._dropped:
                    return None
                self.calls += 1
                function = {"name": name, "arguments": ""}
                call = {"index": self.calls - 1, "id": self.tools.format.new_id(), "type": "function"}
                return {"tool_calls": [call | {"function": function}]}
            case parsers.CallArguments(text):
                if self._dropped:
                    return None
                return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": text}}]}


def _join(last: dict[str, Any], delta: dict[str, Any]) -> bool:
    """Add a delta to the last one. False if it is of another kind, or begins a call."""
    ((kind, value),) = delta.items()
    if kind not in last or (kind == "tool_calls" and ("id" in value[0] or "id" in last[kind][0])):
        return False
    if kind == "tool_calls":
        last[kind][0]["function"]["arguments"] += value[0]["function"]["arguments"]
    else:
        last[kind] += value
    return True


class ParsedChatEncoder(ChatEncoder):
    """One `chat.completion`, with the tool calls and the reasoning that its text has: it is parsed as it comes."""

    def __init__(self, response: Response, parsing: Parsing) -> None:
        super().__init__(response)
        self._parsing = parsing
        self._choices: list[ParsedChoice] = []
        self._deltas: list[list[dict[str, Any]]] = [[] for _ in range(response.n)]

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._choices = [ParsedChoice.of(self._parsing, prompt.text) for _ in range(self.response.n)]

    def encode(self, chunk: OutputChunk) -> bytes:
        text = "".join([token.text for token in chunk.tokens])
        self._deltas[chunk.index] += self._choices[chunk.index].deltas(text, end=chunk.finished is not None)
        return super().encode(chunk)

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        texts: dict[str, list[str]] = {}
        calls: list[dict[str, Any]] = []
        arguments: list[list[str]] = []
        for delta in self._deltas[index]:
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    calls.append({key: value for key, value in call.items() if key != "index"})
                    arguments.append([])
                arguments[-1].append(call["function"]["arguments"])
            for kind, text in delta.items():
                texts.setdefault(kind, []).append(text)
        choice = super().choice(index, sequence, finished)
        message = choice["message"]
        message["content"] = "".join(texts["content"]) if "content" in texts else None if calls else ""
        if "reasoning_content" in texts:
            message["reasoning_content"] = "".join(texts["reasoning_content"])
        for call, pieces in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
        if calls:
            message["tool_calls"] = calls
        choice["finish_reason"] = self._choices[index].reason(finished)
        return choice


class ParsedChatStreamEncoder(ChatStreamEncoder):
    """`chat.completion.chunk`s, with tool calls and reasoning as they are found in the text."""

    def __init__(self, response: Response, parsing: Parsing) -> None:
        super().__init__(response)
        self._parsing = parsing
        self._choices: list[ParsedChoice] = []
        # The hot path: deltas that differ in one text only.
        self._thought = [each.replace(b'"content":%b', b'"reasoning_content":%b') for each in self._content]

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._choices = [ParsedChoice.of(self._parsing, prompt.text) for _ in range(self.response.n)]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Log-probabilities are in the first event of their tokens."""
        choice, events = self._choices[index], self.first(index)
        deltas = choice.deltas("".join([token.text for token in tokens]), end=finished is not None)
        if self.response.detailed and tokens:
            events += self._delta(index, deltas.pop(0) if deltas else {"content": ""}, tokens)
        for delta in deltas:
            if "content" in delta:
                events += self._content[index] % dump_line(delta["content"])
            elif "reasoning_content" in delta:
                events += self._thought[index] % dump_line(delta["reasoning_content"])
            else:
                events += self._delta(index, delta)
        if finished is not None:
            events += self._delta(index, {}, reason=choice.reason(finished))
        return events
