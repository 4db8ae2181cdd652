"""Separates `<think>...</think>` at the beginning of an output from the answer after it."""

from __future__ import annotations

from djl_trtllm.api.output_parsers.base import (
    BLANKS,
    MOST_BLANKS,
    OutputParser,
    Reasoning,
    StateMachine,
    blanks_start,
    safe_end,
)

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser(StateMachine):
    """`answer` parses what follows the reasoning. `thinking`: the output begins with reasoning, tag or no tag.

    Blanks beside the tags belong to them.
    """

    def __init__(self, answer: OutputParser, *, thinking: bool) -> None:
        super().__init__(self.start)
        self._answer = answer
        self._thinking = thinking

    def start(self) -> bool:
        text = self.rest.lstrip(BLANKS)
        blanks = len(self.rest) - len(text)
        if blanks <= MOST_BLANKS:
            if text.startswith(OPEN):
                self.rest, self.state = text[len(OPEN) :], self.begin
                return True
            if OPEN.startswith(text):
                return False
        self.state = self.begin if self._thinking else self.answer
        return True

    def begin(self) -> bool:
        self.skip_blanks()
        self.state = self.think if self.rest else self.begin
        return True

    def think(self) -> bool:
        before, found, after = self.rest.partition(CLOSE)
        cut = blanks_start(before) if found else safe_end(self.rest, CLOSE)
        self._add(self.rest[:cut])
        self.rest = after if found else self.rest[cut:]
        if found:
            self.state = self.gap
        return bool(found)

    def gap(self) -> bool:
        self.skip_blanks()
        self.state = self.answer if self.rest else self.gap
        return True

    def answer(self) -> bool:
        self.events += self._answer.feed(self.rest)
        self.rest = ""
        return False

    def end(self) -> None:
        if self.state == self.think or (self.state == self.start and self._thinking):
            self._add(self.rest)
        elif self.state == self.start:
            self.answer()
        self.events += self._answer.finish()

    def _add(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(text))
