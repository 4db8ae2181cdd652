"""What the tests of TensorRT-LLM share: plans and their arguments, an LLM that is played, a machine with the fake."""

from __future__ import annotations

import asyncio
import functools
import json
import queue
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, ParamSpec

import msgspec
import psutil
import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.tensorrt_llm import executor as tensorrt_llm
from djl_trtllm.backends.tensorrt_llm.arguments import LLM_OWNERS
from djl_trtllm.backends.tensorrt_llm.executor import TensorRtLlmExecutor
from djl_trtllm.backends.tensorrt_llm.names import has
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtEnginePlan, TensorRtLlmPlan
from djl_trtllm.errors import ConfigError
from djl_trtllm.executor.kernels import KEPT
from djl_trtllm.executor.process import StepBuffer
from djl_trtllm.executor.protocol import Step, Submit
from djl_trtllm.model import inspect
from djl_trtllm.request import Sampling
from tests.engines.helpers import H200, configured, gpu_machine
from tests.executor.kit import Probe, run_checked
from tests.fakes.installation import fake_tensorrt_llm, worker_processes
from tests.support import models
from tests.support.processes import PATIENCE
from tests.support.steps import Delta, deltas_of
from tests.support.virtual_time import in_virtual_time

P = ParamSpec("P")


def planned(
    model: Path, version: str = "1.2.1", gpus: int = 8, /, *, gpu: Any = H200, **options: object
) -> TensorRtLlmPlan:
    """Derive a plan, of which every argument is one that this version of TensorRT-LLM has."""
    plan = plan_engine(configured(**options), inspect(model), gpu_machine(version, gpus=gpus, gpu=gpu))
    assert isinstance(plan, TensorRtLlmPlan)
    passed = [plan.running, *([plan.building] if isinstance(plan, TensorRtEnginePlan) else [])]
    for arguments in passed:
        for owner, name in _names(arguments, LLM_OWNERS[plan.backend]):
            assert has(owner, name, version), f"{owner}.{name}"
    return plan


def engine_planned(model: Path, version: str = "1.2.1", gpus: int = 8, /, **options: Any) -> TensorRtEnginePlan:
    """A plan of an engine that is compiled."""
    plan = planned(model, version, gpus, backend="tensorrt", **options)
    assert isinstance(plan, TensorRtEnginePlan)
    return plan


def building(model: Path, version: str = "1.2.1", gpus: int = 8, /, **options: Any) -> dict[str, Any]:
    """The arguments that compile an engine, by `OWNER.FIELD`."""
    return flat(engine_planned(model, version, gpus, **options).building)


def running(model: Path, version: str = "1.2.1", gpus: int = 8, /, **options: Any) -> dict[str, Any]:
    """The arguments that run an engine, or a checkpoint with `backend="pytorch"`, by `OWNER.FIELD`."""
    return flat(planned(model, version, gpus, **{"backend": "tensorrt", **options}).running)


def problems(model: Path, version: str = "1.2.1", gpus: int = 8, /, **options: Any) -> tuple[str, ...]:
    """Return what is wrong with the options."""
    with pytest.raises(ConfigError) as caught:
        planned(model, version, gpus, **options)
    return caught.value.problems


def flat(arguments: Mapping[str, Any], owner: str = "LLM") -> dict[str, Any]:
    """Arguments by `OWNER.FIELD`."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, dict) and "class" in value:
            found |= flat(value, value["class"]) or {f"{owner}.{name}": value["class"]}
        elif name != "class":
            found[f"{owner}.{name}"] = f"{value['enum']}.{value['name']}" if isinstance(value, dict) else value
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What is another, and what is missing."""
    differing = {name: value for name, value in after.items() if name not in before or before[name] != value}
    return differing | {name: ABSENT for name in before if name not in after}


def _names(arguments: Mapping[str, Any], owner: str) -> list[tuple[str, str]]:
    found = []
    for name, value in arguments.items():
        if name == "class":
            continue
        found.append((owner, name))
        if isinstance(value, dict):
            found += [(value["enum"], value["name"])] if "enum" in value else _names(value, value["class"])
    return found


# -- cases.json: options and what they become --------------------------------------------------------------------------

ABSENT = "absent"
"""Of an argument that is passed by default and not with this value."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`option=value`: what changes in building an engine, in running it, and in running a checkpoint with PyTorch."""

    option: str
    value: str
    building: dict[str, Any] = {}
    running: dict[str, Any] = {}
    pytorch: dict[str, Any] = {}


CASES = msgspec.json.decode(Path(__file__).with_name("cases.json").read_bytes(), type=tuple[Case, ...])
assert len(CASES) > 140


# -- a TensorRT-LLM that the test plays, in this process ---------------------------------------------------------------

END = 2


class RequestError(Exception):
    """TensorRT-LLM's."""


class Parameters(SimpleNamespace):
    """An object that is made of keyword arguments."""


class LoRARequest(SimpleNamespace):
    def __init__(self, name: str, number: int, path: str) -> None:
        super().__init__(name=name, number=number, path=path)


class Responses:
    """The queue of a result, with what the reader of responses uses of it."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, response: Any) -> None:
        self._items.append(response)
        asyncio.get_running_loop().call_soon(lambda: self.notify())

    def notify(self) -> None:
        """Replaced by the reader."""

    def empty(self) -> bool:
        return not self._items

    async def get(self) -> Any:
        return self._items.popleft()


class PlayedResult:
    """TensorRT-LLM's future of one request; every `say` and `fail` is one response of the engine."""

    def __init__(self, prompt_ids: list[int], beams: int) -> None:
        self.prompt_ids = prompt_ids
        self.outputs = [
            SimpleNamespace(token_ids=[], logprobs=[], finish_reason=None, stop_reason=None) for _ in range(beams)
        ]
        self.cached_tokens = 0
        self.aborts = 0
        self.abort_error: Exception | None = None
        self.aqueue = Responses()
        self.finished = False

    def say(self, *token_ids: int, end: str | None = None) -> None:
        def respond() -> None:
            self.outputs[0].token_ids = [*self.outputs[0].token_ids, *token_ids]
            for output in self.outputs:
                output.finish_reason = end
            self.finished = end is not None

        self.aqueue.put(respond)

    def fail(self, error: Exception) -> None:
        def respond() -> None:
            raise error

        self.aqueue.put(respond)

    def abort(self) -> None:
        self.aborts += 1
        if self.abort_error is not None:
            raise self.abort_error

    def _handle_response(self, respond: Callable[[], None]) -> None:
        respond()


class PlayedLlm:
    """TensorRT-LLM's LLM. `refusal` is what generate_async raises, `iterations` what its statistics bring."""

    made: ClassVar[list[PlayedLlm]] = []

    def __init__(self, **arguments: Any) -> None:
        self.made.append(self)
        self.arguments = arguments
        self.tokenizer = SimpleNamespace(eos_token_id=END)
        self.results: list[PlayedResult] = []
        self.calls: list[dict[str, Any]] = []
        self.refusal: Exception | None = None
        self.iterations: Callable[[], list[dict[str, Any]]] = list
        self.shutdowns = 0
        self.shut_down: Callable[[], object] = lambda: None
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.has_shut_down = False
        self._executor = SimpleNamespace(_error_queue=self.errors, is_shutdown=lambda: self.has_shut_down)

    def generate_async(self, inputs: list[int], **arguments: Any) -> PlayedResult:
        self.calls.append({"inputs": inputs, **arguments})
        if self.refusal is not None:
            raise self.refusal
        self.results.append(PlayedResult(inputs, getattr(arguments["sampling_params"], "n", 1)))
        return self.results[-1]

    async def get_stats_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        assert timeout == 0
        for iteration in self.iterations():
            yield iteration
        raise asyncio.QueueEmpty

    def shutdown(self) -> None:
        self.shutdowns += 1
        self.shut_down()


class Engine:
    """An executor over a played TensorRT-LLM, and what it has sent."""

    def __init__(self, version: str, **options: Any) -> None:
        values: dict[str, Any] = {
            "backend": "pytorch",
            "model": "model",
            "tokenizer": "tokenizer",
            "arguments": {},
            "max_sequences": 8,
            "max_seq_len": 100,
            **options,
        }
        self.version = version
        self.executor = TensorRtLlmExecutor(**values)
        self.llm = PlayedLlm.made[-1]
        self.steps: list[Step] = []
        self.sent_at: list[float] = []
        self.running: asyncio.Task[None]

    async def begin(self) -> None:
        """Let it run on the present event loop."""
        self.running = asyncio.ensure_future(self.executor.run(StepBuffer(self._send, self.executor.stats)))
        await asyncio.sleep(0)

    def _send(self, step: Step) -> None:
        self.steps.append(step)
        self.sent_at.append(round(asyncio.get_running_loop().time(), 6))

    def submit(self, request_id: int, tokens: int = 9, **fields: Any) -> PlayedResult:
        """`fields` are those of Sampling and of Submit. Returns the future of it."""
        sampling = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
        self.executor.submit(Submit(request_id, [5, 6], Sampling(tokens, **sampling), **fields))
        return self.llm.results[-1] if self.llm.results else PlayedResult([], 1)

    @property
    def deltas(self) -> list[Delta]:
        return [delta for step in self.steps for delta in deltas_of(step)]


class MakeEngine:
    """`make(version, **options)`: an executor over a TensorRT-LLM that is played; `begun`: one that runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(
            tensorrt_llm, "guide_problem", lambda *_, **__: None
        )  # importing transformers takes seconds

    def __call__(self, version: str = "1.2.1", /, **options: Any) -> Engine:
        module = SimpleNamespace(
            __version__=version,
            LLM=PlayedLlm,
            SamplingParams=Parameters,
            GuidedDecodingParams=Parameters,
            LoRARequest=LoRARequest,
            RequestError=RequestError,
        )
        self._monkeypatch.setattr(tensorrt_llm, "import_module", lambda name: module)
        self._monkeypatch.setattr(tensorrt_llm, "build_arguments", dict)
        self._monkeypatch.setattr(tensorrt_llm, "prepare_mpi", lambda: None)
        self._monkeypatch.setattr(tensorrt_llm, "_WORDS_SECONDS", 0.0)
        return Engine(version, **options)

    async def begun(self, version: str = "1.2.1", /, **options: Any) -> Engine:
        engine = self(version, **options)
        await engine.begin()
        return engine


def played(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test in virtual time of a coroutine function; what still runs after it is ended."""

    @in_virtual_time
    @functools.wraps(test)
    async def running(*args: P.args, **kwargs: P.kwargs) -> None:
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        for task in (left := asyncio.all_tasks() - before):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    return running


# -- engine processes on a machine with the fake -----------------------------------------------------------------------

BACKENDS = ["tensorrt", "pytorch"]
PROMPT = (5, 6, 7, 8)
LONG = 100_000


class Machine:
    """A machine with the fake, and hosts on it. `script` is the fake's."""

    def __init__(self, directory: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._model = str(model)
        self._monkeypatch = monkeypatch
        self._log = directory / "calls.jsonl"

    async def start(
        self,
        backend: str = "pytorch",
        script: dict[str, Any] | None = None,
        *,
        version: str = "1.2.1",
        gpus: int = 1,
        arguments: dict[str, Any] | None = None,
        build: dict[str, Any] | None = None,
        timeout: float = PATIENCE,
        warm_up: bool = False,
        **options: Any,
    ) -> Probe:
        """A host that is ready; with `warm_up` its engine has had requests of its own."""
        self.install(version=version, gpus=gpus, script=script)
        for name in ("FLASHINFER_WORKSPACE_BASE", KEPT):  # as an engine process that keeps kernels has them
            self._monkeypatch.setenv(name, str(self._directory))
        limits: dict[str, Any] = {"max_batch_size": 64, "max_seq_len": 2 * LONG}
        if backend == "tensorrt":
            limits = {"build_config": {"class": "BuildConfig", **limits, **(build or {})}}
        elif options.get("iteration_stats", True):
            limits["enable_iter_perf_stats"] = True
        options = {"max_sequences": 64, "max_seq_len": 2 * LONG, "iteration_stats": True, **options}
        probe = Probe(300.0)  # so that the host alone is on the watch
        probe.busy = True
        await probe.start(
            models.TENSORRT_LLM,
            timeout,
            TensorRtLlmPlan.reasons,
            backend=backend,
            model=self._model,
            tokenizer=self._model,
            arguments={**limits, **(arguments or {})},
            warm_up=warm_up,
            **options,
        )
        return probe

    def install(self, **installation: Any) -> None:
        """Install the fake for what is started from now on."""
        for name, value in fake_tensorrt_llm(self._directory, log=self._log, **installation).items():
            self._monkeypatch.setenv(name, value)

    def calls(self, name: str) -> list[dict[str, Any]]:
        """The arguments of the fake's calls of that name."""
        lines = map(json.loads, self._log.read_text().splitlines())
        return [line["arguments"] for line in lines if line["call"] == name]


def in_processes(test: Callable[P, Awaitable[Probe]]) -> Callable[P, None]:
    """Make a test of a coroutine function that returns its probe; afterwards nothing of its host may be left."""

    @functools.wraps(test)
    def running(*args: P.args, **kwargs: P.kwargs) -> None:
        async def closed() -> None:
            probe = await test(*args, **kwargs)
            await probe.client.close()
            left = probe.client._environment
            assert left.clear() == []
            assert not left.temporary.exists()

        run_checked(closed)

    return running


def rank(probe: Probe) -> psutil.Process:
    """The host's worker."""
    (found,) = worker_processes(probe.client.pid)
    return found
