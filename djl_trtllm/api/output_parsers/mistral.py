"""The calls of Mistral's models: `[TOOL_CALLS][{"name", "arguments"}, ...]` or `[TOOL_CALLS]NAME[ARGS]{...}`."""

from __future__ import annotations

import re

from djl_trtllm.api.output_parsers.base import MarkedParser
from djl_trtllm.api.output_parsers.json_call import CallReader

MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_HEAD = re.compile(r"\s*([\w.-]{1,256})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_LONGEST_HEAD = 512


class CallListParser(MarkedParser):
    """Calls in a JSON list."""

    def opened(self) -> bool:
        self.held += self.skip_blanks()
        if not self.rest:
            return False
        if not self.rest.startswith("["):
            return self.other()
        self.held, self.rest = self.held + "[", self.rest[1:]
        return self.read(CallReader())

    def other(self) -> bool:
        """What follows the opener is no list."""
        return self.give_up()

    def after_call(self) -> bool:
        self.skip_blanks()
        if self.rest.startswith(","):
            self.held, self.rest = ",", self.rest[1:]
            return self.read(CallReader())
        if not self.rest:
            return False
        self.rest = self.rest.removeprefix("]")
        self.state = self.between
        return True


class MistralParser(CallListParser):
    """See the module."""

    opener = MARKERS[0]

    def other(self) -> bool:
        if self.rest.startswith("{"):
            return self.read(CallReader())
        at = self.rest.find("{")
        if at < 0 and len(self.rest) <= _LONGEST_HEAD:
            return False
        head = _HEAD.fullmatch(self.rest, 0, at) if 0 <= at <= _LONGEST_HEAD else None
        if head is None:
            return self.give_up()
        self.rest = self.rest[at:]
        return self.read(CallReader.of_arguments(head[1]))
