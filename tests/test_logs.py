from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from djl_trtllm.logs import (
    BackgroundHandler,
    JsonLines,
    RequestContext,
    TextFormatter,
    configure,
    current_request_id,
    mark,
    mark_lines,
    of_request,
    printable,
    request_id_of,
)


def record(**extra: object) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord("x", logging.INFO, "", 0, "text", (), None, extra=extra)


def test_what_runs_inside_belongs_to_the_request_and_nothing_after_it() -> None:
    assert current_request_id() == ""
    with RequestContext("a"):
        with RequestContext("b"):
            assert current_request_id() == "b"
        assert current_request_id() == "a"
    assert current_request_id() == ""


def test_a_task_that_is_started_inside_belongs_to_the_request() -> None:
    async def main() -> str:
        with RequestContext("a"):
            task = asyncio.create_task(identifier())
        return await task

    async def identifier() -> str:
        return current_request_id()

    assert asyncio.run(main()) == "a"


def test_a_line_keeps_the_id_of_the_request_for_which_it_is_made() -> None:
    line = record()
    with RequestContext("a"):
        mark(line)
    assert request_id_of(line) == "a"


def test_an_id_that_is_given_with_a_line_counts_more_than_the_place_that_writes_it() -> None:
    line = record(**of_request("given"))
    with RequestContext("a"):
        mark(line)
    assert request_id_of(line) == "given"


def test_a_line_of_no_request_has_no_id() -> None:
    line = record()
    mark(line)
    assert request_id_of(line) == ""
    assert not hasattr(line, "request_id")


FORGED = "x\n2026-11-22 20:00:00,000 INFO djl_trtllm.server.app: forged\r\x1b[2K\x9b\u2028\u202e\x00"


def record_formats(message: str, *values: object, **extra: object) -> logging.LogRecord:
    line = logging.getLogger("a.b").makeRecord("a.b", logging.INFO, "", 0, message, values, None, extra=extra)
    line.created, line.msecs = 1_795_375_200.25, 250.0
    return line


def parsed(line: logging.LogRecord) -> dict[str, Any]:
    text = JsonLines().format(line)
    assert text.isascii()
    assert text.isprintable()  # one line, whatever reads it
    found: dict[str, Any] = json.loads(text)
    return found


def test_text_has_time_level_logger_and_message() -> None:
    assert re.fullmatch(
        r"2026-11-2\d \d\d:\d\d:00,250 INFO a\.b: loaded 3 files",
        TextFormatter().format(record_formats("loaded %d files", 3)),
    )


def test_text_begins_with_the_id_of_the_request() -> None:
    assert TextFormatter(short=True).format(record_formats("gone", **of_request("r-1"))) == "[r-1] gone"
    assert TextFormatter().format(record_formats("gone", **of_request("r-1"))).endswith("INFO a.b: [r-1] gone")


@pytest.mark.parametrize("message", ["model %s", "%s"])
def test_a_name_cannot_forge_a_line_of_text(message: str) -> None:
    lines = TextFormatter().format(record_formats(message, FORGED)).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("  2026-11-22")
    assert lines[1].endswith("forged\\r\\x1b[2K\\x9b\\u2028\\u202e\\x00")


def test_an_id_cannot_forge_a_line_of_text() -> None:
    assert all(
        line.startswith("  ")
        for line in TextFormatter().format(record_formats("x", **of_request(FORGED))).splitlines()[1:]
    )


def test_the_lines_of_a_traceback_are_indented() -> None:
    line = record_formats("failed")
    line.exc_text = "Traceback\nValueError: x\x1b[31m"
    assert TextFormatter(short=True).format(line) == "failed\n  Traceback\n  ValueError: x\\x1b[31m"


def test_json_has_the_members_of_text_by_name() -> None:
    assert parsed(record_formats("loaded %d files", 3, **of_request("r-1"))) == {
        "time": "2026-11-22T19:20:00.250Z",
        "level": "INFO",
        "logger": "a.b",
        "message": "loaded 3 files",
        "request_id": "r-1",
    }


def test_times_in_json_are_utc_wherever_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "EAST-5")
    try:
        time.tzset()
        assert parsed(record_formats("x"))["time"] == "2026-11-22T19:20:00.250Z"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_json_has_what_belongs_to_the_line_and_not_what_a_library_repeats() -> None:
    found = parsed(record_formats("x", status=404, unwritten={"404": 2}, color_message="\x1b[1mx"))
    assert (found["status"], found["unwritten"], "color_message" in found) == (404, {"404": 2}, False)


def test_json_of_a_name_that_forges_is_one_line_with_the_name() -> None:
    assert parsed(record_formats("model %s", FORGED))["message"] == f"model {FORGED}"


def test_json_has_the_traceback() -> None:
    line = record_formats("failed")
    line.exc_text = "Traceback\nValueError: x"
    assert parsed(line)["traceback"] == line.exc_text


def test_text_that_can_be_printed_stays_as_it_is() -> None:
    assert printable("Straße 漢字 🐺\tx\n") == "Straße 漢字 🐺\tx\n"


def test_half_a_surrogate_pair_can_be_written() -> None:
    assert printable("\ud800").encode() == b"\\ud800"


SECONDS = 60


class Reader(logging.Handler):
    """What reads the log; it may stop to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()
        self.reads.set()
        self.began = threading.Event()
        self.lines: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.began.set()
        assert self.reads.wait(SECONDS)
        self.lines.append(record)

    @property
    def texts(self) -> list[str]:
        return [line.getMessage() for line in self.lines]


@pytest.fixture
def reader() -> Iterator[Reader]:
    found = Reader()
    yield found
    found.reads.set()


def logger_of(handler: logging.Handler) -> logging.Logger:
    made = logging.Logger("x", logging.DEBUG)
    made.addHandler(handler)
    return made


def test_every_line_is_written_in_order(reader: Reader) -> None:
    handler = BackgroundHandler(reader)
    logger = logger_of(handler)
    for number in range(100):
        logger.info("line %d", number)
    handler.close()
    assert reader.texts == [f"line {number}" for number in range(100)]
    assert not handler._thread.is_alive()


def test_who_logs_does_not_wait_for_who_reads_and_what_is_dropped_is_counted(reader: Reader) -> None:
    reader.reads.clear()
    handler = BackgroundHandler(reader, most=3)
    logger = logger_of(handler)
    logger.info("first")
    assert reader.began.wait(SECONDS)
    for number in range(10):
        logger.info("line %d", number)  # would never return
    reader.reads.set()
    handler.close()
    dropped = "7 lines were dropped: the log is read more slowly than it is written"
    assert reader.texts == ["first", dropped, "line 0", "line 1", "line 2"]
    assert reader.lines[1].levelno == logging.WARNING


@pytest.mark.parametrize("extra", [None, of_request("r-1")])
def test_a_line_is_what_it_was_when_it_was_logged(reader: Reader, extra: dict[str, str] | None) -> None:
    reader.reads.clear()
    handler = BackgroundHandler(reader)
    value = ["before"]
    with RequestContext("r-1"):
        logger_of(handler).info("%s", value, extra=extra)
    value[0] = "after"
    reader.reads.set()
    handler.close()
    assert reader.texts == ["['before']"]
    assert request_id_of(reader.lines[0]) == "r-1"


def test_each_line_has_the_time_of_its_own() -> None:
    formatter, line = JsonLines(), record()
    times = []
    for line.created, line.msecs in ((0.25, 250.0), (0.5, 500.0), (61.0, 0.0), (0.25, 250.0)):
        times.append(json.loads(formatter.format(line))["time"])
    assert [time[-10:] for time in times] == ["00:00.250Z", "00:00.500Z", "01:01.000Z", "00:00.250Z"]


def test_a_traceback_is_kept_as_text_and_its_frames_are_not(reader: Reader) -> None:
    handler = BackgroundHandler(reader)
    try:
        raise ValueError("wrong")
    except ValueError:
        logger_of(handler).exception("failed")
    handler.close()
    (line,) = reader.lines
    assert line.exc_info is None
    assert str(line.exc_text).endswith("ValueError: wrong")


def test_other_handlers_get_the_message_of_a_request_without_its_id() -> None:
    line = record(request_id="r-1")
    assert "[r-1] text" in TextFormatter().format(line)
    assert logging.Formatter("%(message)s").formatMessage(line) == "text"


def test_other_handlers_get_the_line_unchanged(reader: Reader) -> None:
    handler, other = BackgroundHandler(reader), Reader()
    logger = logger_of(handler)
    logger.addHandler(other)
    logger.info("%d", 1)
    handler.close()
    assert other.lines[0].args == (1,)


def test_the_end_does_not_wait_for_a_reader_that_does_not_read(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djl_trtllm.logs._LAST_SECONDS", 0.01)
    reader.reads.clear()
    handler = BackgroundHandler(reader, most=1)
    logger = logger_of(handler)
    logger.info("first")
    assert reader.began.wait(SECONDS)
    logger.info("second")
    handler.close()
    assert reader.texts == []


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_process_whose_standard_error_nobody_reads_ends(json_lines: bool) -> None:
    program = (
        "import logging; from djl_trtllm import logs; logs._LAST_SECONDS = 0.01\n"
        f"logs.configure('info', json={json_lines})\n"
        "for _ in range(2000): logging.info('x' * 100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """A root of its own: that of the process has pytest's handlers."""
    made = logging.Logger("root")
    yield made
    for handler in made.handlers:
        handler.close()


def end(root: logging.Logger) -> None:
    for handler in root.handlers:
        handler.close()


def test_lines_of_the_level_and_above_go_to_standard_error(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("warning", root=root)
    root.info("below")
    root.warning("above")
    end(root)
    out, err = capsys.readouterr()
    assert (out, "below" in err) == ("", False)
    assert err.endswith("WARNING root: above\n")


def test_a_line_that_cannot_be_written_does_not_end_the_log(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        """Has no room for the first line."""

        refused = threading.Event()

        def write(self, text: str) -> int:
            if not self.refused.is_set():
                self.refused.set()
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    stream = Full()
    monkeypatch.setattr("sys.stderr", stream)
    configure("info", root=root)
    root.info("one")
    assert stream.refused.wait(SECONDS)
    root.info("two")
    end(root)
    assert "two" in stream.getvalue()


def test_a_line_after_a_pause_is_written_at_once_and_those_that_follow_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, others_are_there = threading.Event(), threading.Event()

    def wait(_: float) -> None:
        waits.set()
        assert others_are_there.wait(SECONDS)

    monkeypatch.setattr("djl_trtllm.logs.time.sleep", wait)
    written: list[str] = []

    class Target(logging.Handler):
        def emit(self, line: logging.LogRecord) -> None:
            written.append(line.getMessage())

        def flush(self) -> None:
            written.append("flushed")

    handler = BackgroundHandler(Target())
    handler.handle(record())
    while written[-1:] != ["flushed"]:  # at once: nothing was written just before
        assert not waits.is_set()
    monkeypatch.setattr("djl_trtllm.logs.time.monotonic", lambda: 0.0)
    del written[:]
    handler.handle(record())
    assert waits.wait(SECONDS)
    for _ in range(3):
        handler.handle(record())
    others_are_there.set()
    handler.close()
    assert written[:5] == [*["text"] * 4, "flushed"]


def test_json_is_a_choice(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", json=True, root=root)
    root.info("a\nb")
    end(root)
    assert json.loads(capsys.readouterr().err)["message"] == "a\nb"


def test_a_second_call_replaces_what_the_first_has_set_up(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", root=root)
    root.info("first")
    (before,) = root.handlers
    configure("debug", json=True, root=root)
    root.debug("second")
    end(root)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("INFO root: first")
    assert json.loads(second)["message"] == "second"
    assert len(root.handlers) == 1
    assert isinstance(before, BackgroundHandler)
    assert not before._thread.is_alive()


def test_a_program_that_has_set_up_its_own_log_keeps_it(root: logging.Logger) -> None:
    own = logging.NullHandler()
    root.addHandler(own)
    root.setLevel("ERROR")
    configure("info", root=root)
    assert (root.handlers, root.level) == ([own], logging.ERROR)


def test_on_a_terminal_lines_are_for_people_and_cannot_control_it(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    console = Console(width=200, record=True, force_terminal=False)
    configure("info", console=console, root=root)
    root.info("model \x1b[2J%s", "x[red]")
    end(root)
    assert "model \\x1b[2Jx[red]" in console.export_text()
    assert isinstance(root.handlers[0], BackgroundHandler)


def test_on_a_terminal_lines_go_to_standard_error_and_name_their_level_once(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    configure("info", root=root)
    root.warning("above")
    end(root)
    out, err = capsys.readouterr()
    assert (out, err.count("WARNING"), err.count("above")) == ("", 1, 1)


def test_lines_of_another_programs_log_begin_with_the_id_and_cannot_be_forged(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, formatted = logging.StreamHandler(), logging.StreamHandler()
    plain.setFormatter(logging.Formatter("%(message)s"))
    formatted.setFormatter(logging.Formatter("own %(message)s"))
    root.addHandler(plain)
    root.addHandler(formatted)
    mark_lines(root)
    with RequestContext("r-1"):
        root.warning("a\nb")
    assert capsys.readouterr().err == "[r-1] a\n  b\nown a\nb\n"


def test_a_formatter_that_is_given_a_format_of_times_uses_it() -> None:
    formatter = TextFormatter()
    assert re.fullmatch(r"\d\d:\d\d", formatter.formatTime(record(), "%H:%M"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", formatter.formatTime(record()))
