"""The calls of a model that had to make one: a guide let it write nothing else."""

from __future__ import annotations

from djl_trtllm.api.output_parsers.base import Event, OutputParser
from djl_trtllm.api.output_parsers.json_call import CallArguments, CallStart
from djl_trtllm.api.output_parsers.mistral import CallListParser


class RequiredParser(CallListParser):
    """A JSON list of calls, without a marker."""

    opener = "[TOOL_CALLS]"  # not looked for, unless the output is no list

    def __init__(self) -> None:
        super().__init__()
        self.state = self.opened


class NamedParser(OutputParser):
    """The arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [] if self._started else [CallStart(self._name)]
        self._started = True
        return [*events, CallArguments(text)]

    def finish(self) -> list[Event]:
        return []
