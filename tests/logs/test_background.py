from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from djl_trtllm.logs.background import BackgroundHandler
from djl_trtllm.logs.context import RequestContext, request_id_of

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


def test_a_line_is_what_it_was_when_it_was_logged(reader: Reader) -> None:
    reader.reads.clear()
    handler = BackgroundHandler(reader)
    value = ["before"]
    with RequestContext("r-1"):
        logger_of(handler).info("%s", value)
    value[0] = "after"
    reader.reads.set()
    handler.close()
    assert reader.texts == ["['before']"]
    assert request_id_of(reader.lines[0]) == "r-1"


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


def test_other_handlers_get_the_line_unchanged(reader: Reader) -> None:
    handler, other = BackgroundHandler(reader), Reader()
    logger = logger_of(handler)
    logger.addHandler(other)
    logger.info("%d", 1)
    handler.close()
    assert other.lines[0].args == (1,)


def test_the_end_does_not_wait_for_a_reader_that_does_not_read(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djl_trtllm.logs.background._LAST_SECONDS", 0.01)
    reader.reads.clear()
    handler = BackgroundHandler(reader, most=1)
    logger = logger_of(handler)
    logger.info("first")
    assert reader.began.wait(SECONDS)
    logger.info("second")
    handler.close()
    assert reader.texts == []
