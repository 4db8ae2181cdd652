"""The encoders of `/v1/chat/completions` for outputs that may have tool calls or reasoning in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.openai.chat import ChatEncoder, ChatStreamEncoder
from djl_trtllm.api.openai.response import FINISH_REASONS, Response
from djl_trtllm.api.openai.tools import ToolUse
from djl_trtllm.api.output import CollectedSequence, dump_line
from djl_trtllm.api.output_parsers import (
    THINK_MARKERS,
    CallArguments,
    CallStart,
    Content,
    Event,
    OutputParser,
    PlainParser,
    Reasoning,
    ReasoningParser,
    closes_reasoning,
    opens_reasoning,
)
from djl_trtllm.config import ReasoningFormat
from djl_trtllm.request import FinishReason, SequenceResult, Token

_ENDS = (FinishReason.END_TOKEN, FinishReason.STOP)


@dataclass(frozen=True, slots=True)
class Parsing:
    """What to look for in the output."""

    tools: ToolUse | None
    reasoning: ReasoningFormat

    @property
    def needed(self) -> bool:
        return self.reasoning is not ReasoningFormat.NONE or (self.tools is not None and self.tools.parser is not None)

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """The special tokens that the parsers have to see."""
        tools = () if self.tools is None else self.tools.shown_tokens
        return tools if self.reasoning is ReasoningFormat.NONE else (*tools, *THINK_MARKERS)

    def choice(self, prompt: str) -> Choice:
        parser = self.tools.parser() if self.tools is not None and self.tools.parser is not None else PlainParser()
        if self.reasoning is not ReasoningFormat.NONE:
            thinks = self.reasoning is ReasoningFormat.DEEPSEEK_R1 and not closes_reasoning(prompt)
            parser = ReasoningParser(parser, thinking=thinks or opens_reasoning(prompt))
        return Choice(parser, self.tools)


@dataclass(slots=True)
class Choice:
    """One sequence: what was found in it becomes deltas of OpenAI's stream."""

    parser: OutputParser
    tools: ToolUse | None
    calls: int = 0
    _dropped: bool = field(default=False)

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

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallStart(name):
                assert self.tools is not None
                self._dropped = self.calls > 0 and not self.tools.parallel
                if self._dropped:
                    return None
                self.calls += 1
                function = {"name": name, "arguments": ""}
                call = {"index": self.calls - 1, "id": self.tools.format.new_id(), "type": "function"}
                return {"tool_calls": [call | {"function": function}]}
            case CallArguments(text):
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
    """One `chat.completion`."""

    def __init__(self, response: Response, parsing: Parsing) -> None:
        super().__init__(response)
        self._parsing = parsing
        self._prompt = ""

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._prompt = prompt.text

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        parsed = self._parsing.choice(self._prompt)
        texts: dict[str, str] = {}
        calls: list[dict[str, Any]] = []
        for delta in parsed.deltas(sequence.text, end=True):
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    calls.append({key: value for key, value in call.items() if key != "index"})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            for kind, text in delta.items():
                texts[kind] = texts.get(kind, "") + text
        choice = super().choice(index, sequence, finished)
        message = choice["message"]
        message["content"] = texts.get("content", None if calls else "")
        if "reasoning_content" in texts:
            message["reasoning_content"] = texts["reasoning_content"]
        if calls:
            message["tool_calls"] = calls
        choice["finish_reason"] = parsed.reason(finished)
        return choice


class ParsedChatStreamEncoder(ChatStreamEncoder):
    """`chat.completion.chunk`s."""

    def __init__(self, response: Response, parsing: Parsing) -> None:
        super().__init__(response)
        self._parsing = parsing
        self._choices: list[Choice] = []
        # The hot path: deltas that differ in one text only.
        self._thought = [content.replace(b'{"content":', b'{"reasoning_content":') for content in self._content]

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._choices = [self._parsing.choice(prompt.text) for _ in range(self.response.n)]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Log-probabilities are in the first event of their tokens."""
        choice, events = self._choices[index], self.first(index)
        deltas = choice.deltas("".join([token.text for token in tokens]), end=finished is not None)
        if self.response.logprobs and tokens:
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
