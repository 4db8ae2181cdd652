"""What it costs to find tool calls in outputs of a megabyte, in every format.

    python -m benchmarks.output_parsers [--only TEXT]

`call` is one call with a long text, `calls` one short call after the other, `text` an answer without a call. Each comes
whole (ms of processor time), and the first in tokens of four characters too (µs for each token).
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.table import Table

from djl_trtllm.service.engine import settle_garbage_collector
from tests.support.dialogues import WRITERS, parser, write

_SIZE = 1 << 20
_LINE = 'The wolf said "run" and ran.\n'
_TOKEN = 4


def _seconds(writer: str, pieces: list[str]) -> float:
    own, begin = parser(writer), time.process_time()
    for piece in pieces:
        own.feed(piece)
    own.finish()
    return time.process_time() - begin


def main() -> None:
    """Measure the formats that the arguments name."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", default="", help="formats whose names have this text")
    only = arguments.parse_args().only
    settle_garbage_collector()  # as in a server
    table = Table("format", "call, ms", "calls, ms", "calls", "text, ms", "token, µs")
    for writer in (writer for writer in WRITERS if only in writer):
        long = write(writer, "", [("look", {"s": _LINE * (_SIZE // len(_LINE))})], "")
        count = _SIZE // len(write(writer, "", [("look", {"s": _LINE})], ""))
        many = write(writer, "", [("look", {"s": _LINE})] * count, "")
        whole = [_seconds(writer, [text]) * 1e3 for text in (long, many, _LINE * (_SIZE // len(_LINE)))]
        tokens = [long[at : at + _TOKEN] for at in range(0, len(long), _TOKEN)]
        each = _seconds(writer, tokens) / len(tokens) * 1e6
        table.add_row(writer, *(f"{ms:.0f}" for ms in whole[:2]), str(count), f"{whole[2]:.0f}", f"{each:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
