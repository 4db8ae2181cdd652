"""`djl-trtllm size MODEL --measure`: measures max_num_tokens here, and prints the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.console import Console

from djl_trtllm.commands.console import errors_for_the_reader, say

if TYPE_CHECKING:
    from djl_trtllm.finder.measure import Measured


class Asked(NamedTuple):
    """The flags of a measurement; None: the default."""

    memory: str | None = None
    requests: int | None = None
    request_tokens: int | None = None
    precision: float | None = None
    fresh: bool = False
    as_json: bool = False


def measure_command(model: str, options: Mapping[str, Any], asked: Asked) -> None:
    """Measure and print the result; progress is on standard error.

    Exit status: 0 with a result, 1 if nothing fits or a trial fails otherwise, 130 after Ctrl-C.
    """
    console = Console(stderr=True)
    with errors_for_the_reader():
        # Importing the service takes half a second; other commands do without.
        from djl_trtllm.finder.display import Display
        from djl_trtllm.finder.load import Load
        from djl_trtllm.finder.measure import Settings, measure

        load = Load(asked.requests or Load().requests, asked.request_tokens or Load().tokens)
        settings = Settings(_bound(asked.memory), asked.precision, asked.fresh)
        try:
            with Display(console) as display:
                found = measure(model, options, load, settings, display)
        except KeyboardInterrupt:
            say(console, "interrupted: run the same command again to go on; finished trials are kept")
            raise typer.Exit(130) from None
    if asked.as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        for line in result_lines(found):
            say(Console(), line)
    if found.max_num_tokens is None:
        raise typer.Exit(1)


def result_lines(found: Measured) -> list[str]:
    """The result for people; the last line is the option to paste."""
    from djl_trtllm.finder.outcome import doing

    if found.max_num_tokens is None:
        last = found.attempts[-1]
        return [
            f"Out of memory with every max_num_tokens down to {last.tokens:,}, while {doing(last.phase)}: "
            f"{last.reason}",
            "Quantise the model (option.quantize), use more GPUs (option.tensor_parallel_degree) or more memory.",
        ]
    seconds = sum(attempt.seconds for attempt in found.attempts)
    top = ", the largest that makes a difference" if found.unbounded else ""
    return [
        f"Maximum: max_num_tokens={found.max_num_tokens:,}{top} ({len(found.attempts)} trials, {seconds:.0f} s)",
        "Recommended, half of it, so that the KV cache has room:",
        f"option.max_num_tokens={found.recommended}",
    ]


def _bound(text: str | None) -> int | None:
    from djl_trtllm.errors import SizingError
    from djl_trtllm.sizing.machines import bytes_of

    if text is None:
        return None
    memory = bytes_of(text)
    if not memory:
        raise SizingError(f"--memory {text}: expected the memory of an engine on the CPU in bytes, or as 8GB or 500MB")
    return memory
