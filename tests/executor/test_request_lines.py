"""Lines that the engine process prints for a request."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest

from djl_trtllm.executor.request_lines import MarkedOutput, mark_output, printing_for, split_mark


def lines(stream: io.StringIO) -> list[tuple[str, str]]:
    """What the server reads."""
    return [split_mark(line) for line in stream.getvalue().removesuffix("\n").split("\n")]


@contextmanager
def printing() -> Iterator[io.StringIO]:
    """What this process prints inside."""
    stream = io.StringIO()
    with redirect_stdout(stream), redirect_stderr(stream):
        mark_output()
        yield stream


def test_a_line_has_the_id_of_the_request_that_it_is_printed_for() -> None:
    with printing() as printed:
        print("loading")
        with printing_for("story-1"):
            print("one", "and", "the same line")
            logging.StreamHandler(sys.stderr).handle(logging.makeLogRecord({"msg": "by logging\nof two lines"}))
            with printing_for("story-2"):
                print("inner")
            print()
        print("running")
        assert lines(printed) == [
            ("", "loading"),
            ("story-1", "one and the same line"),
            ("story-1", "by logging"),
            ("story-1", "of two lines"),
            ("story-2", "inner"),
            ("story-1", ""),
            ("", "running"),
        ]
        assert "\x1e" not in printed.getvalue().splitlines()[0]


def test_a_traceback_has_the_id_in_each_line() -> None:
    with printing() as printed:
        with printing_for("story-1"):
            try:
                raise ValueError("no such token\nin two lines")
            except ValueError:
                traceback.print_exc()
        found = lines(printed)
        assert {request for request, _ in found} == {"story-1"}
        assert [text for _, text in found][-2:] == ["ValueError: no such token", "in two lines"]


def test_what_a_task_prints_belongs_to_the_request_that_started_it() -> None:
    with printing() as printed:

        async def follow(name: str) -> None:
            await asyncio.sleep(0)
            print("task of", name)

        async def body() -> None:
            tasks = []
            for name in ("a", "b"):
                with printing_for(name):
                    tasks.append(asyncio.create_task(follow(name)))
            print("between")
            await asyncio.gather(*tasks)

        asyncio.run(body())
        assert lines(printed) == [("", "between"), ("a", "task of a"), ("b", "task of b")]


def test_an_end_of_a_line_belongs_to_its_beginning() -> None:
    with printing() as printed:
        sys.stdout.write("progress: 1")
        with printing_for("story-1"):
            assert sys.stdout.write("") == 0
            assert sys.stdout.write(", 2\n3\n") == 6
        assert lines(printed) == [("", "progress: 1, 2"), ("story-1", "3")]


@pytest.mark.parametrize("name", ['a "quoted" \\ name', "two\nlines", "\x1e", "Grüße", '\x1e"other"\x1e'])
def test_no_id_can_be_read_as_another_or_make_a_line(name: str) -> None:
    with printing() as printed:
        with printing_for(name):
            print("text")
        assert lines(printed) == [(name, "text")]


@pytest.mark.parametrize(
    "line", ["", "plain", "\x1e", '\x1e"open', '\x1e"no end"', "\x1eno quotes\x1e text", 'x\x1e"a"\x1e b']
)
def test_a_line_without_a_mark_is_left_as_it_is(line: str) -> None:
    assert split_mark(line) == ("", line)


def test_an_id_that_cannot_be_read_is_none() -> None:
    assert split_mark('\x1e"\\q"\x1e text') == ("", '\x1e"\\q"\x1e text')


def test_all_else_of_the_stream_is_there() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    marked = MarkedOutput(stream)
    assert (marked.encoding, marked.buffer) == ("latin-1", stream.buffer)
