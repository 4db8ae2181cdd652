"""The calls of Llama 3: `{"name", "parameters"}`, after `<|python_tag|>` or alone, several parted by `;` or lines."""

from __future__ import annotations

from collections.abc import Set

from djl_trtllm.api.output_parsers.base import BLANKS, MOST_BLANKS, MarkedParser
from djl_trtllm.api.output_parsers.json_call import CallReader

TAG = "<|python_tag|>"


class Llama3JsonParser(MarkedParser):
    """See the module. Without the tag, only an answer that begins with a call of one of `names` is one."""

    opener = TAG

    def __init__(self, names: Set[str]) -> None:
        super().__init__()
        self._names = names
        self.state = self.start

    def start(self) -> bool:
        blanks = len(self.rest) - len(self.rest.lstrip(BLANKS))
        if blanks == len(self.rest) <= MOST_BLANKS:
            return False
        if blanks <= MOST_BLANKS and self.rest[blanks] == "{":
            self.held = self.skip_blanks()
            return self.read(CallReader(self._names))
        self.state = self.content
        return True

    def opened(self) -> bool:
        return self.read(CallReader())

    def after_call(self) -> bool:
        rest = self.rest.lstrip(BLANKS + ";")
        if not rest:
            return False
        self.held, self.rest = self.rest[: len(self.rest) - len(rest)], rest
        if rest.startswith("{"):
            return self.read(CallReader(self._names))
        self.held = self.held.strip(BLANKS)
        return self.give_up()
