"""The calls of Hermes 2 Pro, Qwen 2.5, Qwen 3 and many others: `<tool_call>{"name", "arguments"}</tool_call>`."""

from __future__ import annotations

from djl_trtllm.api.output_parsers.base import MarkedParser
from djl_trtllm.api.output_parsers.json_call import CallReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MarkedParser):
    """See the module. A call that the model did not close is a call."""

    opener = OPEN

    def opened(self) -> bool:
        return self.read(CallReader())

    def after_call(self) -> bool:
        self.skip_blanks()
        if not self.rest.startswith(CLOSE) and CLOSE.startswith(self.rest):
            return False
        self.rest = self.rest.removeprefix(CLOSE)
        self.state = self.between
        return True
