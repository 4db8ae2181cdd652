"""`djl-trtllm generate`: the prompts of a file in, JSON lines out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.offline.options import open_offline_model
from djl_trtllm.offline.progress import batch_progress
from djl_trtllm.offline.prompt_file import JSON_SUFFIXES, read_entries
from djl_trtllm.offline.result_line import format_line
from djl_trtllm.offline.runner import Runner

_STANDARD = Path("-")


def generate_file(
    model: str, prompts: Path, out: Path, parameters: Mapping[str, Any], console: Console, *, text: bool = False
) -> int:
    """Continue the prompts of a file, and write a line for each in their order, as soon as it is known.

    `-` is stdin and stdout. `parameters` are parameters of the LMI schema for all lines; `text`: the file is text
    whatever it looks like. Progress goes to the console. All lines are read and checked before anything else is done.
    Returns how many prompts failed. Raises DjlTrtllmError if nothing could be run, BrokenPipeError when nobody reads
    the output any more.
    """
    data = _read(prompts)
    json_lines = not text and (prompts.suffix in JSON_SUFFIXES or data.lstrip()[:1] == b"{")
    entries = read_entries(data, "stdin" if prompts == _STANDARD else str(prompts), parameters, json_lines=json_lines)
    if not entries:
        console.print(f"{prompts} has no prompts", markup=False, highlight=False)
        return 0
    if out != _STANDARD and out.exists() and prompts != _STANDARD and out.samefile(prompts):
        raise DjlTrtllmError(f"--out {out} is the file of the prompts: name another")
    failed = 0
    with _opened(out) as stream, closing(Runner(open_offline_model(model, {}))) as runner:
        begun = time.monotonic()
        results = runner.run(entry.request for entry in entries)
        total, shown = len(entries), batch_progress(len(entries), lambda: runner.generated_tokens, console)
        with closing(results), shown as advance:
            for entry, result in zip(entries, results, strict=True):
                stream.write(format_line(entry, result))
                stream.flush()
                failed += result.failure is not None
                advance()
        console.print(
            f"{total} prompts, {runner.generated_tokens} tokens in {time.monotonic() - begun:.1f} s"
            + (f'; {failed} prompts failed, see "error" in their lines' if failed else ""),
            highlight=False,
        )
    return failed


def _read(path: Path) -> bytes:
    if path == _STANDARD:
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise DjlTrtllmError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path == _STANDARD:
        yield sys.stdout.buffer
        return
    try:
        stream = path.open("wb")
    except OSError as error:
        raise DjlTrtllmError(f"{path} cannot be written: {error.strerror}") from None
    with stream:
        yield stream
