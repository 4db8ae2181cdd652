"""Every error the package raises on purpose.

    DjlTrtllmError
    ├── ConfigError                 options: all problems of one resolution at once
    ├── ModelError                  model files
    │   ├── ArchiveError            an archive that is broken or unsafe to extract
    │   ├── DownloadError           files that cannot be had from the hub or from S3, or not whole
    │   ├── LayoutError             a directory that is not a model, or not one that can be served here
    │   └── TokenizerError          tokenizer files missing or unreadable
    ├── EngineError                 compiled engines
    │   ├── BuildError              compiling failed (carries the log's path and last lines)
    │   ├── CompilerMissingError    compiling is needed and the compiler is not installed
    │   └── EngineMismatchError     an engine that does not fit this machine, these options or its manifest
    ├── ExecutorError               the executor host process
    │   ├── ExecutorStartError      it did not come up
    │   └── ExecutorDiedError       it was killed, hung or raised
    ├── DeploymentError             AWS refused, or an endpoint did not come up
    └── RequestError                one request; others are not affected
        ├── InvalidRequestError     malformed, or a value out of range
        │   ├── UnknownAdapterError     no LoRA adapter of that name
        │   ├── PromptTooLongError  prompt, or prompt plus output, above a limit
        │   └── UnsupportedParameterError   understood, and not available on this backend
        ├── OverloadedError         refused at admission: the queue is full
        ├── NotReadyError           the model is loading, recovering, draining or failed
        ├── RequestTimeoutError     not finished within predict_timeout
        └── GenerationError         the engine failed while this request was running

Layers raise these and nothing else for expected failures. HTTP statuses are the dialects' business
(`djl_trtllm.api`); a test asserts that every `RequestError` is mapped in every dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class DjlTrtllmError(Exception):
    """Base of all expected errors. `str(error)` is meant for the reader: what, where, what to do."""


class ConfigError(DjlTrtllmError):
    """One or more options are wrong.

    `problems` holds one line each (key, value, origin, expectation), `warnings` what else was noticed on the way (a
    misspelt key, say); the message is all of them.
    """

    def __init__(self, problems: Sequence[str], warnings: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        self.warnings = tuple(warnings)
        count = len(self.problems)
        head = "1 configuration problem" if count == 1 else f"{count} configuration problems"
        lines = [f"{head}:", *(f"  - {problem}" for problem in self.problems)]
        if self.warnings:
            lines += ["and noticed besides:", *(f"  - {warning}" for warning in self.warnings)]
        super().__init__("\n".join(lines))


class ModelError(DjlTrtllmError):
    """Model files are missing, unreadable or of an unknown kind."""


class ArchiveError(ModelError):
    """A `.tar.gz` that is broken, too large, or unsafe to extract."""


class DownloadError(ModelError):
    """Files that cannot be had from the Hugging Face hub or from S3; nothing half is left to be taken for whole."""


class LayoutError(ModelError):
    """A directory whose content is no model this package serves; the message lists what was found."""


class TokenizerError(ModelError):
    """Tokenizer files are missing or cannot be loaded."""


class EngineError(DjlTrtllmError):
    """A compiled engine cannot be made or used."""


class BuildError(EngineError):
    """Compiling an engine failed.

    `log_path` is the compiler's whole log, `tail` its last lines (they are part of the message). `cause` names the
    class of the failure where it is known (out of GPU memory, unsupported architecture, ...), `advice` what to do then.
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
    """A checkpoint must be compiled, and the packages that compile it are not installed."""


class EngineMismatchError(EngineError):
    """An engine and this machine, these options or its own manifest disagree; the message says where."""


class ExecutorError(DjlTrtllmError):
    """The executor host process failed."""


class ExecutorStartError(ExecutorError):
    """The executor host did not become ready: the engine failed to load, or loading took too long."""


class ExecutorDiedError(ExecutorError):
    """A running executor host was killed, hung past its bound, or raised."""


class DeploymentError(DjlTrtllmError):
    """A SageMaker endpoint cannot be made or removed."""


class RequestError(DjlTrtllmError):
    """One request cannot be answered."""


class InvalidRequestError(RequestError):
    """The request is malformed or a value in it is out of range."""


class PromptTooLongError(InvalidRequestError):
    """The prompt, or prompt plus requested output, does not fit; the message holds the numbers."""


class UnknownAdapterError(InvalidRequestError):
    """No LoRA adapter of that name is registered; the message lists those that are."""


class UnsupportedParameterError(InvalidRequestError):
    """A parameter that is understood and that this backend cannot honour."""


class OverloadedError(RequestError):
    """The request queue is full.

    `queue_depth` counts the requests that wait, `capacity` how many may, `retry_after` is in seconds.
    """

    def __init__(self, message: str, *, queue_depth: int, capacity: int, retry_after: int) -> None:
        self.queue_depth = queue_depth
        self.capacity = capacity
        self.retry_after = retry_after
        super().__init__(message)


class NotReadyError(RequestError):
    """The model is not ready; `retry_after` (seconds) is None where waiting will not help."""

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class RequestTimeoutError(RequestError):
    """The request did not finish within `predict_timeout`."""


class GenerationError(RequestError):
    """The engine failed while it was generating for this request."""
