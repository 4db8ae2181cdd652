"""Log lines of TensorRT-LLM's two loggers, and its coloured progress lines."""

from __future__ import annotations

import os
import sys
import time

_LEVELS = {"internal_error": 0, "error": 1, "warning": 2, "info": 3, "verbose": 4, "debug": 5, "trace": 5}
_LETTERS = {"error": "E", "warning": "W", "info": "I", "debug": "D"}
_COLOURS = {"grey": "\x1b[38;20m", "yellow": "\x1b[33;20m", "red": "\x1b[31;20m", "bold_green": "\033[1;32m"}


class Logger:
    """The Python side's: to standard output, filtered by TLLM_LOG_LEVEL."""

    def __init__(self) -> None:
        self.level = os.environ.get("TLLM_LOG_LEVEL", "warning").lower()

    def set_level(self, level: str) -> None:
        self.level = level

    def _log(self, level: str, message: str) -> None:
        if _LEVELS[level] <= _LEVELS.get(self.level, 2):
            now = time.strftime("%m/%d/%Y-%H:%M:%S")
            print(f"[{now}] [TRT-LLM] [{_LETTERS[level]}] {message}", flush=True)

    def error(self, message: str) -> None:
        self._log("error", message)

    def warning(self, message: str) -> None:
        self._log("warning", message)

    def info(self, message: str) -> None:
        self._log("info", message)

    def debug(self, message: str) -> None:
        self._log("debug", message)


logger = Logger()


def cpp_log(level: str, message: str) -> None:
    """A line of the C++ runtime."""
    print(f"[TensorRT-LLM][{level}] {message}", flush=True)


def print_colored(message: str, colour: str | None = None) -> None:
    """A progress line, to standard error."""
    sys.stderr.write(f"{_COLOURS[colour]}{message}\x1b[0m" if colour else message)
    sys.stderr.flush()
