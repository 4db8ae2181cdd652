"""Reasoning in generated text, before or within the answer, and channels of which one is reasoning."""

import contextlib
import re
from collections.abc import Container

from djl_trtllm.api.output_parsers import reader
from djl_trtllm.api.output_parsers.calls import CallParser
from djl_trtllm.api.output_parsers.formats import FEW_BLANKS, FLAT, Thinking


class ReasoningParser(reader.Reader):
    """Separates reasoning from the answer, which `answer` parses.

    `thinking`: the output begins with reasoning, marker or no marker. Blanks beside the markers belong to them.
    """

    def __init__(self, own: Thinking, answer: reader.OutputParser, *, thinking: bool) -> None:
        super().__init__()
        self._format = own
        self._answer = answer
        self._thinking = thinking
        calls = answer.format.openers if own.ends_at_call and isinstance(answer, CallParser) else None
        self._ends = reader.Markers(own.close, *(calls.texts if calls is not None else ()))

    def read(self) -> reader.Waiting:
        try:
            yield from self._begin()
            if self._thinking:
                yield from self._reasoning()
            opener = reader.Markers(self._format.open)
            while True:
                found = opener.find(self.text, self.at) if self._format.anywhere else None
                if found is not None:
                    self._pass_on(found.start())
                    self.take(found.end())
                    yield from self._reasoning()
                    continue
                self._pass_on(opener.begun(self.text, self.at) if self._format.anywhere else len(self.text))
                yield from self.more()
        except reader.EndOfText:
            if self._thinking:
                self.say(self.text[self.at :], reader.Reasoning)
            else:
                self._pass_on(len(self.text))
            self.events += self._answer.finish()

    def _begin(self) -> reader.Waiting:
        """Read the marker that the output begins with, if there is one."""
        own = self._format
        while True:
            text = self.text.lstrip(reader.BLANKS)
            if len(self.text) - len(text) > reader.MOST_BLANKS:
                return
            for marker in (own.open, own.close):
                if text.startswith(marker):
                    self.at = len(self.text) - len(text) + len(marker)
                    self._thinking = marker == own.open
                    yield from self.skip_blanks()
                    return
            if not own.open.startswith(text) and not own.close.startswith(text):
                return
            yield from self.more()

    def _reasoning(self) -> reader.Waiting:
        self._thinking = True
        yield from self.skip_blanks()
        _, end = yield from self.up_to(self._ends, reader.Reasoning)
        self._thinking = False
        if end != self._format.close:  # what begins a call belongs to the answer
            self.at -= len(end)
            return
        yield from self.skip_blanks()

    def _pass_on(self, end: int) -> None:
        self.events += self._answer.feed(self.take(end))


_NAME = r"([\w.-]{1,256})"
_HEADER = reader.Markers("<|start|>", "<|channel|>")
_MESSAGE = reader.Markers("<|message|>")
_ENDS = reader.Markers("<|end|>", "<|call|>", "<|return|>", *_HEADER.texts)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.-]{1,256})")
_COMMENTARY = r"<\|channel\|>commentary"
_USUAL_CALL = re.compile(
    rf"{FEW_BLANKS}<\|start\|>assistant(?:{_COMMENTARY} to=functions\.{_NAME}| to=functions\.{_NAME}{_COMMENTARY})"
    rf"(?: ?<\|constrain\|>json| json)?<\|message\|>{FEW_BLANKS}({FLAT}){FEW_BLANKS}<\|(?:call|end|return)\|>",
    re.DOTALL,
)


class ChannelParser(reader.Reader):
    """The messages of gpt-oss: `<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final...`.

    A message to `functions.NAME` is a call, if there are `tools`; the channel `analysis` and messages to other
    recipients are reasoning, if `reasoning`. All others are content, and so is text without a header.
    """

    def __init__(self, tools: Container[str] | None, *, reasoning: bool) -> None:
        super().__init__()
        self.tools = tools
        self.reasoning = reasoning

    def read(self) -> reader.Waiting:
        with contextlib.suppress(reader.EndOfText):
            yield from self.skip_blanks()
            begun = yield from self.stands("to=")  # the prompt has the beginning of the header
            while True:
                if self.tools is not None and not begun:
                    self._usual_calls()
                opener = "" if begun else (yield from self.up_to(_HEADER, reader.Content))[1]
                begun = False
                try:
                    header, _ = yield from self.head(_MESSAGE)
                except reader.NoMatch:
                    self.say(opener)
                    continue
                yield from self._message(opener + header)

    def _usual_calls(self) -> None:
        """Read calls, as long as they are whole and in their usual form."""
        while (found := _USUAL_CALL.match(self.text, self.at)) is not None:
            self.events += (reader.CallStart(found[1] or found[2]), reader.CallArguments(found[3]))
            self.at = found.end()

    def _message(self, header: str) -> reader.Waiting:
        name, kind = self._recipient(header)
        if name:
            self.events.append(reader.CallStart(name))
        try:
            if (yield from self.skip_blanks()) == "{" and name:
                with contextlib.suppress(reader.NoMatch):
                    yield from self.json(streamed=True)
                kind = reader.Content
            _, end = yield from self.up_to(_ENDS, kind)
        except reader.EndOfText:
            self.say("" if name else self.text[self.at :].rstrip(reader.BLANKS), kind)
            raise
        if end in _HEADER.texts:
            self.at -= len(end)

    def _recipient(self, header: str) -> tuple[str, reader.Kind]:
        """The function that a message calls ("" if it calls none), and the kind of the message."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self.tools is not None and (recipient[1] or recipient[2] in self.tools):
            return recipient[2], reader.CallArguments
        own = recipient is not None or (channel is not None and channel[1] == "analysis")
        return "", reader.Reasoning if own and self.reasoning else reader.Content
