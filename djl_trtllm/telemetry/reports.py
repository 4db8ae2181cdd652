"""Requests at their end: the facts that the front end has noted, their line in the log, the record, and their way to
OpenTelemetry.

The options and OpenTelemetry's environment variables say whether there are traces and metrics. OpenTelemetry is
imported only if they ask for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from logging.handlers import RotatingFileHandler
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import orjson

from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.batching.statistics import RequestRecord
from djl_trtllm.config import Options
from djl_trtllm.config.sources import shortened
from djl_trtllm.engines.cache import installed_versions
from djl_trtllm.errors import ConfigError
from djl_trtllm.logs import SHORT, BackgroundHandler, of_request
from djl_trtllm.request import FINISH_WORDS, GenerationRequest, Sampling, total
from djl_trtllm.version import __version__

if TYPE_CHECKING:
    from djl_trtllm.telemetry.otel import OtelMetrics, SpanTraces


LONGEST = 200
"""Characters of a path or a name in a line or a trace: clients may name a model with a megabyte."""

CLIENT_LEFT = 499
"""The status of a request whose client left before there was a response; nginx has given it this number."""


class Generated(NamedTuple):
    """The engine's work for a request; several prompts count from the first start to the last end.

    Times are those of `time.monotonic`, None for what did not happen. `reasons` are LMI's, as in the metrics.
    """

    prompt_tokens: int
    output_tokens: int
    queued: float
    started: float | None
    first_token: float | None
    last_token: float | None
    reasons: tuple[str, ...]
    resumes: int = 0
    reseeded: bool = False
    accepted_tokens: int | None = None
    drafted_tokens: int | None = None
    images: int = 0
    image_tokens: int = 0

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Generated:
        """The engine's work for the prompts of a request."""
        started = [each.started for each in records if each.started is not None]
        first = [each.first_token_at for each in records if each.first_token_at is not None]
        last = [each.last_token_at for each in records if each.last_token_at is not None]
        accepted = [each.accepted_tokens for each in records if each.accepted_tokens is not None]
        reasons = [FINISH_WORDS[each.reason] for each in records if each.reason is not None]
        return cls(
            sum(map(attrgetter("prompt_tokens"), records)),
            sum(map(attrgetter("generated_tokens"), records)),
            min(map(attrgetter("arrived"), records)),
            min(started, default=None),
            min(first, default=None),
            max(last, default=None),
            tuple(dict.fromkeys(reasons)),
            sum(map(attrgetter("resumes"), records)),
            any(map(attrgetter("reseeded"), records)),
            sum(accepted) if accepted else None,
            total(map(attrgetter("drafted_tokens"), records)),
            sum(map(attrgetter("images"), records)),
            sum(map(attrgetter("image_tokens"), records)),
        )


class Asked(NamedTuple):
    """The parameters of a request (of its first prompt), under the names that OpenTelemetry's conventions use."""

    operation: str
    max_tokens: int
    temperature: float
    top_p: float
    n: int

    @classmethod
    def of(cls, request: GenerationRequest) -> Asked:
        sampling = request.sampling
        operation = "text_completion" if request.messages is None else "chat"
        most = sampling.max_new_tokens or request.default_new_tokens
        temperature = sampling.temperature if sampling.do_sample else 0.0
        return cls(operation, most, temperature, sampling.top_p, sampling.n)


class ServedRequest(msgspec.Struct, eq=False):
    """The facts about a request at its end; the front end fills it in while the request runs.

    `method` and `path` are HTTP's, or what stands for them. `status` is HTTP's, or gRPC's by name. `error` is the class
    of what went wrong: messages may quote the text of a request. `headers` (lower case) may have the context of a
    trace. `reads`: it changes nothing and generates nothing. `quiet`: it has no line even where it fails, as a health
    check does while a model is loading. `client` is the name of its API key, or a hash of what names it. `recorded` are
    its prompts' requests if it was chosen to be recorded.
    """

    id: str
    method: str
    path: str
    headers: Mapping[str, str] = MappingProxyType({})
    dialect: str = ""
    model: str = ""
    client: str = ""
    status: int | str = CLIENT_LEFT
    error: str = ""
    reads: bool = False
    quiet: bool = False
    asked: Asked | None = None
    recorded: Sequence[GenerationRequest] = ()
    generations: Sequence[RequestState] = ()
    began: float = msgspec.field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return self.status >= 400 if isinstance(self.status, int) else self.status != "OK"

    def any_error(self) -> str:
        """Return the class of what went wrong in the front end, or while it generated; empty if nothing did."""
        if self.error:
            return self.error
        for state in self.generations:
            if state.record.error:
                return state.record.error
        return ""

    def generated(self) -> Generated | None:
        """Return what the engine did; None if the request never was in the waiting queue."""
        return Generated.of([state.record for state in self.generations]) if self.generations else None


_requests = logging.getLogger("djl_trtllm.requests")

_MOST_LINES = 10
_SECONDS = 1.0
"""Requests that never generated have at most `_MOST_LINES` lines in this time; the others are counted."""
_BARE = re.compile(r"[^\s\"=]+")


class RequestLog:
    """Writes the lines, on an event loop.

    Each request that generated has a line. Other requests have at most 10 lines a second, and then one line with the
    number of requests without a line, and with the client that sent most of them. Health checks, and pages that were
    read, are for the level DEBUG. Of the requests that succeed, a `share` has a line, chosen at random; the others are
    not counted.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        share: float = 1.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._share = share
        self._chance = chance
        self._window = float("-inf")
        self._lines = 0
        self._unwritten: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def write(self, request: ServedRequest, fields: dict[str, Any]) -> None:
        """Write the line of a request that has ended now; `fields` are added to it."""
        level = logging.DEBUG if request.quiet or (request.reads and not request.failed) else logging.INFO
        if not _requests.isEnabledFor(level):
            return
        # Before `_has_room`: what has no line anyway takes none of a refusal.
        error = request.any_error()
        if not request.failed and not error and self._chance() >= self._share:
            return
        if not request.generations and level > logging.DEBUG and not self._has_room(request):
            return
        method, path = _short(request.method), _short(request.path)
        fields = {**_fields(request, error, self._clock()), **fields}
        shown = [f"{name}={_quoted(value) if type(value) is str else value}" for name, value in fields.items()]
        text = " ".join([_quoted(method), _quoted(path), str(request.status), *shown])
        # As `log` does it, which would look for the file and line where it is called.
        record = logging.LogRecord(_requests.name, level, "", 0, text, (), None)
        if request.id:
            vars(record).update(of_request(request.id))
        vars(record).update({"method": method, "path": path, "status": request.status, **fields, SHORT: "request"})
        _requests.handle(record)

    def _has_room(self, request: ServedRequest) -> bool:
        now = self._clock()
        if now - self._window >= _SECONDS:
            self._window, self._lines = now, 0
        self._lines += 1
        if self._lines <= _MOST_LINES:
            return True
        if not self._unwritten:
            asyncio.get_running_loop().call_later(_SECONDS, self.flush)
        self._unwritten[str(request.status)] += 1
        self._refused[request.client] += 1
        return False

    def flush(self) -> None:
        """Write the number of requests that have no line, if there are any."""
        unwritten, self._unwritten = self._unwritten, Counter()
        refused, self._refused = self._refused, Counter()
        if not unwritten:
            return
        statuses = ", ".join(f"{number} with {status}" for status, number in sorted(unwritten.items()))
        ((client, most),) = refused.most_common(1)
        busiest = f"; {most} of client={_quoted(_short(client))}" if client else ""
        text = "%d more requests did not generate and have no line: %s%s"
        _requests.info(text, unwritten.total(), statuses, busiest, extra={"unwritten": dict(unwritten)})


def _fields(request: ServedRequest, error: str, now: float) -> dict[str, Any]:
    """Return the fields of the line behind method, path and status, by their names in JSON."""
    fields: dict[str, Any] = {}
    generated = request.generated()
    if request.model:
        fields["model"] = _short(request.model)
    if request.dialect:
        fields["dialect"] = request.dialect
    if request.client:
        fields["client"] = _short(request.client)
    if error:
        fields["error"] = error
    if generated is not None:
        fields["prompt_tokens"] = generated.prompt_tokens
        if generated.images:
            fields |= {"images": generated.images, "image_tokens": generated.image_tokens}
        fields["output_tokens"] = generated.output_tokens
        if generated.accepted_tokens is not None:
            fields["accepted_tokens"] = generated.accepted_tokens
        if generated.drafted_tokens is not None:
            fields["drafted_tokens"] = generated.drafted_tokens
        if generated.started is not None:
            fields["queue_seconds"] = round(generated.started - generated.queued, 4)
        if generated.first_token is not None:
            fields["ttft_seconds"] = round(generated.first_token - request.began, 4)
        fields["finish_reason"] = ",".join(generated.reasons)
        if generated.resumes:
            fields |= {"resumes": generated.resumes, "reseeded": generated.reseeded}
    fields["total_seconds"] = round(now - request.began, 4)
    return fields


@lru_cache(maxsize=256)
def _short(text: str) -> str:
    return shortened(text, LONGEST)


@lru_cache(maxsize=1024)
def _quoted(text: str) -> str:
    return text if _BARE.fullmatch(text) else json.dumps(text)


logger = logging.getLogger(__name__)

# -- the record: a sample of requests that `djl-trtllm bench` and `djl-trtllm quality` replay -------------------------

_ENGINES = ("openvino-genai", "tensorrt-llm", "vllm")
_MOST_WAITING = 256
"""Entries that wait for the disk, each with its prompt; more are dropped and counted in the log."""
_NEUTRAL = Sampling()


class _Lines(RotatingFileHandler):
    """Writes entries to a file, which only its owner may read if it is new; a full one becomes `FILE.1`.

    An entry that is larger than the file may be loses its prompt.
    """

    _said = False

    def _open(self) -> io.TextIOWrapper:
        # Lines are UTF-8 in characters of Latin-1: rotation counts characters, and the bound is one of bytes.
        private = partial(os.open, mode=0o600)
        return open(self.baseFilename, "a", encoding="latin-1", opener=private)

    def format(self, record: logging.LogRecord) -> str:
        head, prompt = record.entry  # type: ignore[attr-defined]
        line = orjson.dumps(head | prompt, default=list)  # prompts are arrays
        return (line if len(line) < self.maxBytes else orjson.dumps(head)).decode("latin-1")

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "entry"):
            super().emit(record)
        else:
            logger.warning("%s: %s", self.baseFilename, record.getMessage())

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:  # the thread that writes goes on, and so may later entries
            self._say_once()

    def handleError(self, record: logging.LogRecord) -> None:
        self._say_once()

    def _say_once(self) -> None:
        if not self._said:
            self._said = True
            text = "%s: requests could not be recorded, which is said once: %s"
            logger.warning(text, self.baseFilename, sys.exc_info()[1])


class Recorder:
    """Chooses requests and records them. Raises ConfigError for a file that cannot be written."""

    def __init__(self, options: Options, chance: random.Random | None = None) -> None:
        assert options.record_file is not None
        self._share, self._prompts = options.record_share, options.record_prompts
        self._chance = chance or random.Random()  # noqa: S311  # which requests are recorded is no secret
        self._versions = {"djl-trtllm": __version__, **installed_versions(_ENGINES)}
        try:
            lines = _Lines(options.record_file, maxBytes=options.record_max_bytes, backupCount=1)
        except OSError as error:
            raise ConfigError(
                f"record_file={options.record_file}: cannot write it: {error.strerror}; name a file in a folder "
                "that this process may write to, or unset it"
            ) from None
        self._lines, self._file = BackgroundHandler(lines, _MOST_WAITING), lines

    def chooses(self) -> bool:
        """Whether the next request is one that is recorded."""
        return self._chance.random() < self._share

    def write(self, served: ServedRequest) -> None:
        """Record a chosen request that has ended, with an entry for each of its prompts that was queued.

        Nothing replays texts that become vectors: those are not recorded.
        """
        for request, state in zip(served.recorded, served.generations, strict=False):
            if request.pooling is not None:
                continue
            entry = self._head(served, request, state), self._prompt(request, state)
            record = logger.makeRecord(logger.name, logging.INFO, "", 0, "", (), None, extra={"entry": entry})
            self._lines.handle(record)

    def close(self) -> None:
        """Write what waits."""
        self._lines.close()
        with contextlib.suppress(OSError):  # a full disk, which has been said
            self._file.close()

    def _head(self, served: ServedRequest, request: GenerationRequest, state: RequestState) -> dict[str, Any]:
        record, sequences, sampling = state.record, state.sequences, request.sampling
        set_fields = {
            name: value
            for name in Sampling.__struct_fields__
            if (value := getattr(sampling, name)) != getattr(_NEUTRAL, name) and name != "max_new_tokens"
        }
        return {
            "time": time.time(),
            "id": served.id,
            "model": served.model,
            "dialect": served.dialect,
            "versions": self._versions,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.generated_tokens,
            "max_tokens": max(1, *(len(sequence.token_ids) for sequence in sequences)),
            "finish_reason": None if record.reason is None else FINISH_WORDS[record.reason],
            "parameters": {"do_sample": sampling.do_sample, **set_fields}
            | ({} if sequences[0].seed is None else {"seed": sequences[0].seed})
            | ({} if request.adapter is None else {"adapters": request.adapter}),
        }

    def _prompt(self, request: GenerationRequest, state: RequestState) -> dict[str, Any]:
        if self._prompts == "lengths":
            return {}
        found: dict[str, Any] = {"prompt_ids": state.sequences[0].prompt_ids}
        if self._prompts == "text":
            texts = {"prompt": request.prompt, "messages": request.messages}
            found |= {name: value for name, value in texts.items() if value}
        return found


# -- OpenTelemetry, and all reports together ---------------------------------------------------------------------------

_LAST_SECONDS = 3.0
"""The most seconds that the end of the server waits for a collector."""

Signal = Literal["traces", "metrics"]
T = TypeVar("T")

HTTP, GRPC = "http/protobuf", "grpc"
_PACKAGES = {HTTP: "djl-trtllm[otel]", GRPC: "opentelemetry-exporter-otlp-proto-grpc"}
_DISABLED = "OTEL_SDK_DISABLED"
_OPTION = "SERVING_OTLP_TRACES_ENDPOINT"


def _asked_by(signal: Signal, environ: Mapping[str, str]) -> str | None:
    """Return the variable that asks for a signal; None if none does. Raises ConfigError."""
    name = f"OTEL_{signal.upper()}_EXPORTER"
    exporter = environ.get(name, "").strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise ConfigError(f"{name}={exporter} (environment): expected otlp or none")
    if exporter:
        return name if exporter == "otlp" else None
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((name for name in endpoints if environ.get(name)), None)


def _open(signal: Signal, environ: Mapping[str, str], given: str | None, make: Callable[[str], T]) -> T | None:
    """Return the result of `make` for the protocol that the environment names; None if nothing asks for the signal.

    `given` is the option with its endpoint. Raises ConfigError if the signal is asked for and cannot be made: the
    protocol is not known, packages are missing or OpenTelemetry refuses its variables.
    """
    if environ.get(_DISABLED, "").strip().lower() == "true":
        return None
    asked = _OPTION if given else _asked_by(signal, environ)
    if asked is None:
        return None
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((name for name in names if environ.get(name)), None)
    protocol = HTTP if name is None else environ[name].strip().lower()
    if protocol not in _PACKAGES:
        raise ConfigError(f"{name}={protocol} (environment): expected {HTTP} or {GRPC}")
    try:
        return make(protocol)
    except ImportError as error:
        raise ConfigError(
            f"{asked} asks for {signal}, and OpenTelemetry's packages are not installed ({error}): pip install "
            f"'{_PACKAGES[protocol]}', or unset it; {_DISABLED}=true switches {signal} off"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{asked} asks for {signal}, and OpenTelemetry refuses its variables: {error}") from None


def open_traces(options: Options, environ: Mapping[str, str]) -> SpanTraces | None:
    """Return the traces; None if nothing asks for them. Raises ConfigError if they are asked for and cannot be made."""

    def make(protocol: str) -> SpanTraces:
        from djl_trtllm.telemetry.otel import SpanTraces, exporter

        endpoint = _usable(options.otlp_traces_endpoint)
        # OTLP over HTTP has a path for each kind of data.
        bare = endpoint is not None and protocol == HTTP and not urlsplit(endpoint).path.strip("/")
        return SpanTraces(exporter("trace", protocol, f"{endpoint}".rstrip("/") + "/v1/traces" if bare else endpoint))

    return _open("traces", environ, options.otlp_traces_endpoint, make)


def _usable(endpoint: str | None) -> str | None:
    """The endpoint. Raises ConfigError if it is no address."""
    if not endpoint:
        return None
    try:
        address = urlsplit(endpoint)
        usable = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{_OPTION}={endpoint} (environment): expected an address such as http://localhost:4318/v1/traces"
        )
    return endpoint


def open_metrics(environ: Mapping[str, str]) -> OtelMetrics | None:
    """Return the metrics; None if nothing asks for them. Raises ConfigError if they cannot be made."""

    def make(protocol: str) -> OtelMetrics:
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        from djl_trtllm.telemetry.otel import OtelMetrics, exporter

        return OtelMetrics(PeriodicExportingMetricReader(exporter("metric", protocol)))

    return _open("metrics", environ, None, make)


class Telemetry:
    """Reports requests to the log, to OpenTelemetry as traces and metrics, and to a record, each where it is given.

    `shown` is what is reported of a text that a client has written: a path, the name of a model.
    """

    def __init__(
        self,
        log: RequestLog | None = None,
        traces: SpanTraces | None = None,
        metrics: OtelMetrics | None = None,
        record: Recorder | None = None,
        shown: Callable[[str], str] = str,
    ) -> None:
        self._log = log
        self._traces = traces
        self._metrics = metrics
        self._record = record
        self._shown = shown
        self.exports = traces is not None or metrics is not None
        """Whether OpenTelemetry gets requests: their headers, and what they ask for, are kept for it."""

    @classmethod
    def open(
        cls, options: Options, environ: Mapping[str, str] = os.environ, shown: Callable[[str], str] = str
    ) -> Telemetry:
        """Return what the options and OpenTelemetry's variables ask for. Raises ConfigError."""
        log = RequestLog(share=options.request_log_share) if options.request_log else None
        record = None if options.record_file is None else Recorder(options)
        return cls(log, open_traces(options, environ), open_metrics(environ), record, shown)

    def began(self, served: ServedRequest, requests: Sequence[GenerationRequest]) -> None:
        """Keep the facts about a request that its reports need at its end, and no others."""
        if self.exports:
            served.asked = Asked.of(requests[0])
        if self._record is not None and self._record.chooses():
            served.recorded = requests

    def ended(self, request: ServedRequest) -> None:
        """Report a request that has ended; errors in here are logged and do not reach it."""
        try:
            request.path, request.model = self._shown(request.path), self._shown(request.model)
            fields: dict[str, Any] = {} if self._traces is None else self._traces.record(request)
            if self._log is not None:
                self._log.write(request, fields)
            if self._metrics is not None:
                self._metrics.record(request)
            if self._record is not None and request.recorded:
                self._record.write(request)
        except Exception:
            logger.exception("reporting a request failed", extra=of_request(request.id))

    def ended_soon(self, request: ServedRequest) -> None:
        """Report a request from a consumer of its last chunk: the rolling batch counts a chunk after delivering it."""
        asyncio.get_running_loop().call_soon(self.ended, request)

    def close(self) -> None:
        """Write and send what waits; a collector that does not answer is not waited for."""
        if self._log is not None:
            self._log.flush()
        senders = [sender for sender in (self._traces, self._metrics, self._record) if sender is not None]
        threads = [threading.Thread(target=sender.close, name="telemetry", daemon=True) for sender in senders]
        for thread in threads:
            thread.start()
        until = time.monotonic() + _LAST_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
