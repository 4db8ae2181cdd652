"""A model in this process: everything above the engine process is real, and what the engine generates is played.

    with Hosts().installed() as hosts:
        service = ModelService("story")
        await service.load(played_model(tokenizer))
        asked = await ask(service, tokens=2)
        hosts.last.step()                             # a token for every request that runs

The tokens are those of the scripted executor: every request gets its prompt again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import orjson

from djl_trtllm.api.base import RawRequest
from djl_trtllm.api.kept import Kept
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.backends.scripted.executor import FEATURES, ScriptedExecutor, ScriptedPoolingExecutor
from djl_trtllm.batching.admission import BatchLimits
from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.config import Backend, Config, Task
from djl_trtllm.errors import DjlTrtllmError, ExecutorDiedError, RequestError
from djl_trtllm.executor.protocol import Limits, Start, Step, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult
from djl_trtllm.service.lifecycle import ModelService, ServedModel, State
from djl_trtllm.service.model import Model, Texts
from djl_trtllm.service.work import Calls
from tests.support import models
from tests.support.steps import Delta, step_of
from tests.support.tables import options_of

PROMPT = "the little red riding hood went into the dark wood to see her grandmother"

_PID = 4000
"""Process id of the first host; Linux gives such a one to no process of a test."""


def played_model(tokenizer: Tokenizer, directory: Path = Path("/story"), **options: Any) -> Model:
    """A model for played hosts, named `story`. `options` are fields of `Options`; `script` is the executor's script."""
    start = Start(models.SCRIPTED, options.pop("script", {}))
    config = Config(options_of(options))
    if config.options.task in (Task.EMBED, Task.SCORE):
        bounds = {"max_sequences": 8, "max_seq_len": 512, "max_num_tokens": 1024}
        start = Start(models.SCRIPTED_POOLING, {"task": config.options.task.value, "script": start.options, **bounds})
    limits = BatchLimits(
        max_batch_size=config.options.max_rolling_batch_size,
        max_queue_size=config.options.job_queue_size,
        max_input_len=config.options.max_input_len,
        max_output_len=config.options.max_output_len,
        max_seq_len=config.options.max_seq_len or config.options.max_input_len + config.options.max_output_len,
        resume=config.options.resume_after_restart,
    )
    kept = Kept(config.options)
    return Model("story", directory, config, start, limits, lambda: Texts(tokenizer), 0, Backend.SCRIPTED, kept)


async def loaded(tokenizer: Tokenizer, **options: Any) -> ModelService:
    """A service of `played_model`."""
    service = ModelService("story")
    await service.load(played_model(tokenizer, **options))
    return service


class Asked:
    """A request to a service, and what came of it."""

    def __init__(self) -> None:
        self.updates: list[OutputChunk] = []
        self.generations: list[RequestState]

    def __call__(self, update: OutputChunk) -> None:
        self.updates.append(update)

    @property
    def finished(self) -> SequenceResult | None:
        """Its end; there is one at most."""
        ends = [update.finished for update in self.updates if update.finished is not None]
        assert len(ends) <= 1, ends
        return ends[0] if ends else None

    @property
    def reason(self) -> FinishReason | None:
        """Why it ended."""
        return None if self.finished is None else self.finished.reason

    @property
    def error(self) -> RequestError | None:
        """What it failed with."""
        return None if self.finished is None else self.finished.error

    @property
    def text(self) -> str:
        """What was generated so far."""
        return "".join(token.text for update in self.updates for token in update.tokens)


async def ask(service: ModelService, tokens: int = 4, prompt: str = PROMPT, **parameters: Any) -> Asked:
    """Send a request to a service."""
    payload = {"inputs": prompt, "parameters": {"max_new_tokens": tokens, **parameters}}
    asked = Asked()
    call = DEFAULT.parse(RawRequest(orjson.dumps(payload), {}), service.model)
    await asyncio.sleep(0)  # the fifth prompt of a turn is tokenised by a thread, for which virtual time does not wait
    asked.generations = await service.generate(call, asked)
    return asked


def state_of(service: ModelService | ServedModel) -> State:
    """Its state now. (For mypy, an attribute that was compared keeps its value.)"""
    return service.state


class PlayedHost:
    """Stands in for an engine process's client: see `ExecutorClient`.

    Nothing comes until the test calls `step`; with `hosts.alone`, all comes by itself.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        on_steps: Callable[[list[Step]], None],
        on_death: Callable[[ExecutorDiedError], None],
        busy: Callable[[], bool],
        hang_timeout: float,
    ) -> None:
        self.pid = _PID + len(hosts.made)
        self.busy = busy
        self.hang_timeout = hang_timeout
        self.features = hosts.features
        self.details: dict[str, Any] = {"device": "played"}
        self.limits: Limits
        self.started_with: Start | None = None
        self.load_timeout = 0.0
        self.started_at = 0.0
        self.resident = hosts.resident
        self.submitted: list[Submit] = []
        self.cancelled: list[int] = []
        self.closed = False
        self._hosts = hosts
        self._on_steps = on_steps
        self._on_death = on_death
        self._executor: ScriptedExecutor | ScriptedPoolingExecutor
        self._next_step: asyncio.Handle | None = None

    # -- what the service calls ------------------------------------------------------------------------------------

    async def start(
        self, start: Start, timeout: float, *, meanwhile: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """See `ExecutorClient`. What a played model loads meanwhile is there, and a thread has no virtual time."""
        self.started_with, self.load_timeout = start, timeout
        self.started_at = asyncio.get_running_loop().time()
        try:
            await asyncio.sleep(self._hosts.load_seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # the end of a process takes a moment
            self.closed = True
            raise
        if failure := self._hosts.failure():
            raise failure
        options = start.options if self._hosts.script is None else self._hosts.script
        self._executor = resolve_name(start.executor)(**options)
        self.limits = self._executor.limits

    async def close(self) -> None:
        """See `ExecutorClient`."""
        self.closed = True
        if self._next_step is not None:
            self._next_step.cancel()

    def resident_bytes(self) -> int:
        """See `ExecutorClient`."""
        return self.resident

    async def measure_memory(self) -> int:
        """See `ExecutorClient`."""
        return self.resident

    def submit(self, request: Submit) -> None:
        """See `ExecutorClient`."""
        self.submitted.append(request)
        self._executor.submit(request)
        if self._hosts.alone and self._next_step is None:
            self._next_step = asyncio.get_running_loop().call_soon(self._step_alone)

    def cancel(self, request_id: int) -> None:
        """See `ExecutorClient`."""
        self.cancelled.append(request_id)
        self._executor.cancel(request_id)

    # -- what the test calls ---------------------------------------------------------------------------------------

    def step(self, times: int = 1) -> None:
        """Iterations of the engine, each with a token for every request that runs."""
        for _ in range(times):
            self._on_steps([self._stepped()])

    def send(self, *deltas: Delta) -> None:
        """An iteration of the test's own."""
        self._on_steps([step_of(deltas, self._executor.stats())])

    def die(self, message: str = "it was killed by SIGSEGV", *, killed: bool = False) -> None:
        """The host's end; with `killed` something outside brought it about."""
        self._on_death(ExecutorDiedError(f"the engine process (pid {self.pid}) is gone: {message}", killed=killed))

    def _stepped(self) -> Step:
        step = self._executor.step()
        step.stats = self._executor.stats()
        return step

    def _step_alone(self) -> None:
        # Of what was submitted until now: what comes during an iteration joins the next one, as in an engine.
        step = self._stepped()
        self._next_step = asyncio.get_running_loop().call_later(self._hosts.step_seconds, self._end_step, step)

    def _end_step(self, step: Step) -> None:
        self._next_step = None
        if self._executor.busy and not self.closed:
            # It does not wait until somebody has read what this one gave.
            self._step_alone()
        self._on_steps([step])


class CallsHere(Calls, AbstractContextManager["CallsHere"]):
    """What `BoundedCalls` does in a process of its own, here."""

    def __init__(self, subject: str) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class RendererHere:
    """Renders chat templates without a process."""

    def __init__(self, tokenizer: Tokenizer, timeout: float) -> None:
        self._tokenizer = tokenizer

    async def render(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> str:
        return self._tokenizer.render_chat(messages, **keywords)

    async def close(self) -> None:
        pass


class Hosts:
    """Makes the hosts of services, and remembers them.

    `failures` are raised by the next starts, one by each, None for a start that succeeds. `alone`: hosts generate by
    themselves, with iterations of `step_seconds`. `load_seconds` is what a start takes, `resident` the memory of a new
    host in bytes. `script` stands in for options that are not the scripted executor's.
    """

    def __init__(self) -> None:
        self.made: list[PlayedHost] = []
        self.failures: list[DjlTrtllmError | None] = []
        self.features = FEATURES
        self.alone = False
        self.step_seconds = 0.0
        self.load_seconds = 0.0
        self.resident = 10**9
        self.script: dict[str, Any] | None = None

    def failure(self) -> DjlTrtllmError | None:
        """Why the next start fails, if it does."""
        return self.failures.pop(0) if self.failures else None

    def __call__(self, **callbacks: Any) -> PlayedHost:
        self.made.append(PlayedHost(self, **callbacks))
        return self.made[-1]

    @property
    def last(self) -> PlayedHost:
        """The newest."""
        return self.made[-1]

    @contextmanager
    def installed(self) -> Iterator[Hosts]:
        """Every `ModelService` of this process starts its hosts here. At the end all are closed."""
        with (
            mock.patch("djl_trtllm.service.engine.ExecutorClient", self),
            mock.patch("djl_trtllm.service.prompts.ChatRenderer", RendererHere),
            mock.patch("djl_trtllm.service.model.BoundedCalls", CallsHere),
        ):
            yield self
