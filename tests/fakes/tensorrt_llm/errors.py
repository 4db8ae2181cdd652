"""TensorRT-LLM's exceptions (facts §7.1)."""

from __future__ import annotations

import traceback


class RequestError(RuntimeError):
    """One request failed; the engine goes on."""


class CppExecutorError(RuntimeError):
    """The engine failed."""

    def __init__(self, message: str | None = None) -> None:
        self.message = message
        self.stack_trace = traceback.format_exc()
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}\nStack trace:\n{self.stack_trace}"
