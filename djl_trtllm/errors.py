"""The exceptions that the package raises on purpose.

Every layer raises these for expected failures, and nothing else. Each dialect maps them to HTTP statuses
(`djl_trtllm.api`); a test asserts that every dialect maps every `RequestError`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class DjlTrtllmError(Exception):
    """Base of all expected errors. `str(error)` says what is wrong, where, and what to do."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled as a call with their message, and not all classes take only that.
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[DjlTrtllmError], args: tuple[Any, ...]) -> DjlTrtllmError:
    return kind.__new__(kind, *args)


class ConfigError(DjlTrtllmError):
    """One or more options are wrong.

    `problems` has one line per wrong value (key, value, origin, expectation), or one line in all. `warnings` has
    further findings, such as a misspelt key. The message lists both.
    """

    def __init__(self, problems: str | Sequence[str], warnings: Sequence[str] = ()) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.warnings = tuple(warnings)
        count = len(self.problems)
        head = "1 configuration problem" if count == 1 else f"{count} configuration problems"
        lines = [f"{head}:", *(f"  - {problem}" for problem in self.problems)]
        if self.warnings:
            lines += ["warnings:", *(f"  - {warning}" for warning in self.warnings)]
        super().__init__("\n".join(lines))


class ModelError(DjlTrtllmError):
    """Model files are missing, unreadable or of an unknown kind."""


class ArchiveError(ModelError):
    """A `.tar.gz` that is broken, too large, or unsafe to extract."""


class DownloadError(ModelError):
    """Files from the Hugging Face hub or S3 are unavailable or incomplete. No partial download is kept as complete."""


class NotDescribedError(ModelError):
    """The fetched files do not say what the model is; its other files are fetched when it is served."""


class LayoutError(ModelError):
    """A directory does not hold a model that this package serves; the message lists what was found."""


class TokenizerError(ModelError):
    """Tokenizer files are missing or cannot be loaded."""


class EngineError(DjlTrtllmError):
    """An engine cannot be compiled or used."""


class BuildError(EngineError):
    """Compiling an engine failed.

    `log_path` is the compiler's log, `tail` its last lines (part of the message). `cause` is the class of the failure
    if it is known (out of GPU memory, unsupported architecture, ...), `advice` what to do about it.
    """

    def __init__(
        self,
        message: str,
        log_path: Path | None = None,
        tail: Sequence[str] = (),
        cause: str | None = None,
        advice: str | None = None,
    ) -> None:
        self.log_path = log_path
        self.tail = tuple(tail)
        self.cause = cause
        self.advice = advice
        lines = [message] if advice is None else [message, advice]
        if self.tail:
            lines += ["last lines of the log:", *(f"  | {line}" for line in self.tail)]
        if log_path is not None:
            lines.append(f"whole log: {log_path}")
        super().__init__("\n".join(lines))


class CompilerMissingError(EngineError):
    """A checkpoint must be compiled, and the compiler's packages are not installed."""


class EngineMismatchError(EngineError):
    """An engine does not fit this machine, these options or its own manifest; the message lists the differences."""


class ExecutorError(DjlTrtllmError):
    """The engine process failed.

    `killed`: the kernel or a person ended it by SIGKILL, or memory ran out and the kernel ended a process, which may
    have been a worker of the engine.
    """

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class ExecutorStartError(ExecutorError):
    """The engine process did not become ready: the engine failed to load, or loading took too long."""


class ExecutorDiedError(ExecutorError):
    """A running engine process was killed, stopped responding or raised an error."""


class SizingError(DjlTrtllmError):
    """A GPU or instance type is unknown, or the numbers for an estimate are impossible."""


class BenchmarkError(DjlTrtllmError):
    """There is no server to measure, or the load cannot be made."""


_MOST_CHARACTERS = 2000


def clipped(text: str) -> str:
    """`text`, without its middle if it is long: clients and logs do not get back all that a client sent."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    end = _MOST_CHARACTERS // 4  # it says what was expected
    return f"{text[: _MOST_CHARACTERS - end]} [{len(text) - _MOST_CHARACTERS} characters] {text[-end:]}"


class RequestError(DjlTrtllmError):
    """One request failed. Messages are `clipped`."""

    def __init__(self, message: str = "") -> None:
        super().__init__(clipped(message))


class InvalidRequestError(RequestError):
    """The request is malformed or a value in it is out of range."""


class SessionError(InvalidRequestError):
    """The request's stateful session is unknown or has expired, or there are no sessions here."""


class PromptTooLongError(InvalidRequestError):
    """The prompt, or prompt plus requested output, is too long; the message gives the numbers."""


class UnknownAdapterError(InvalidRequestError):
    """No LoRA adapter of that name is registered; the message lists the registered ones."""


class HarmfulRequestError(InvalidRequestError):
    """Engine processes were lost because of the same request; the message names it by its digest."""


class UnsupportedParameterError(InvalidRequestError):
    """A known parameter that this backend does not support."""


class UnsupportedTaskError(InvalidRequestError):
    """A request for text to a model that makes vectors, or the reverse."""


class OverloadedError(RequestError):
    """The request queue is full.

    `queue_depth` is the number of waiting requests, `capacity` the limit, `retry_after` is in seconds.
    """

    def __init__(self, message: str, *, queue_depth: int, capacity: int, retry_after: int) -> None:
        self.queue_depth = queue_depth
        self.capacity = capacity
        self.retry_after = retry_after
        super().__init__(message)


class TooManyRequestsError(OverloadedError):
    """The client has `max_requests_per_client` requests. `queue_depth` is their number, `capacity` the limit."""


class NotReadyError(RequestError):
    """The model is not ready; `retry_after` (seconds) is None if waiting does not help."""

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class UnknownModelError(RequestError):
    """No model is found for the request. `name` is the one it gives; None if it has to give one and does not."""

    def __init__(self, message: str, *, name: str | None) -> None:
        self.name = name
        super().__init__(message)


class UnknownPathError(RequestError):
    """Nothing is served at the request's path."""


class AuthenticationError(RequestError):
    """The request has no API key, or none of this server's."""


class ForbiddenError(RequestError):
    """The request's API key does not have the role that the request needs."""


class MethodNotAllowedError(RequestError):
    """The path takes the HTTP methods in `allow` ("GET, POST") only."""

    def __init__(self, message: str, *, allow: str) -> None:
        self.allow = allow
        super().__init__(message)


class RequestTooLargeError(RequestError):
    """The request body is larger than `max_request_size`."""


class RequestTimeoutError(RequestError):
    """The request did not finish within `predict_timeout`."""


_PLACE_IN_SOURCE = re.compile(
    r"(?:\s*\(|\s+(?:at|from)\s+)?(?<![\w./+-])/?(?:[\w.+-]+/)+[\w.+-]+\.(?:cpp|cc|cu|h|hpp)(?::\d+)*\)?:?"
    r"|\n\s*\d+\s+0x[^\n]*"
)


class GenerationError(RequestError):
    """The engine failed while it was running this request.

    Places in the engine's source and addresses of its stack are left out: they are for the log.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_PLACE_IN_SOURCE.sub("", clipped(message)))
