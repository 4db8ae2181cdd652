"""Backends: engines that run models, each as one class in a folder of its own, and the registry of them.

The folder also has the plan (an `EnginePlan`, which names the executor and the compiler), the executor with the names
of the request fields that it honours, and the option map. Importing the class imports no engine. `_BUILT_IN` lists the
classes of this package; another package adds one by entry points, one for each value of `option.backend`:

    [project.entry-points."djl_trtllm.backends"]
    echo = "echo_engine.backend:EchoBackend"
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

from packaging.version import Version

from djl_trtllm.backends.effects import Effects, with_admission
from djl_trtllm.config import Backend, Config, Task
from djl_trtllm.engines.hardware import Hardware, release_of
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout
from djl_trtllm.plugins import BACKENDS, plugins

_TENSORRT_LLM = "djl_trtllm.backends.tensorrt_llm.backend:TensorRtLlmBackend"
_BUILT_IN = {
    "tensorrt": _TENSORRT_LLM,
    "pytorch": _TENSORRT_LLM,
    "autodeploy": _TENSORRT_LLM,
    "vllm": "djl_trtllm.backends.vllm.backend:VllmBackend",
    "openvino": "djl_trtllm.backends.openvino.backend:OpenVinoBackend",
    "scripted": "djl_trtllm.backends.scripted.backend:ScriptedBackend",
}
"""The classes by values of `option.backend`. `auto` asks them in this order."""


@dataclass(frozen=True)
class Bound:
    """The most that an option can be: what the engine was compiled for, or what another option of the user leaves.

    `name` is the engine's name for it. `option` is the field of that other option.
    """

    value: int
    name: str
    option: str | None = None


@dataclass(frozen=True)
class PrefixCache:
    """An engine's prefix cache. `separate`: prompts with different salts share none of its blocks."""

    engine: str
    separate: bool


@dataclass(frozen=True)
class Built:
    """The limits that an engine was compiled for, by fields of `Options`.

    `where` names the file that says so. `defaults` are the values of options that the user did not set, `bounds` those
    that options cannot exceed.
    """

    where: str
    defaults: Mapping[str, Any]
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Offer(NamedTuple):
    """A backend's answer to `option.backend=auto`.

    If there is a `backend`, `reason` says why it runs the model ("": because no other backend does). Otherwise `reason`
    says why it does not.
    """

    backend: Backend | None
    reason: str


class EngineBackend(ABC):
    """An engine under one or several values of `option.backend`."""

    effects: Mapping[str, Effects]
    """The values of `option.backend` that select it, each with its option map."""

    tasks: frozenset[Task] = frozenset({Task.GENERATE})
    """The tasks of the models that this backend runs."""

    has_gpus: bool = True
    """Whether the engine runs on GPUs; an engine that never does needs no GPU reserved, or supposed for a plan."""

    batch_size: int = 0
    """Sequences at the same time where the user has set no number; 0: the option's default."""

    automatic: tuple[str, ...] = ()
    """The values of `option.backend` that `auto` may become."""

    def inspect(self, hardware: Hardware) -> Hardware:
        """Add to this machine's hardware what is installed for the engine; imports no engine."""
        return hardware

    def suppose(self, hardware: Hardware) -> Hardware:
        """The hardware as if the engine's packages and devices were there, for plans of another machine."""
        return hardware

    @abstractmethod
    def accept(self, backend: Backend, setting: str, layout: Layout, hardware: Hardware) -> str:
        """Accept a model that the user assigns to `backend`, one of its names; returns the reason in one line.

        `setting` is the option with its value and origin. Raises EngineError if the engine cannot run here or cannot
        load these files.
        """

    def offer(self, layout: Layout, hardware: Hardware) -> Offer:
        """Answer whether `auto` may select the backend for these files on this machine; by default it never does.

        Raises EngineError where no other backend loads the files and this one cannot run here.
        """
        return Offer(None, "")

    def usual(self, hardware: Hardware) -> Backend | None:
        """Return what `auto` selects for a Hugging Face checkpoint on this machine, or None: not this engine."""
        return None

    def arguments(self) -> Mapping[str, str]:
        """The engine's arguments that settings `option.NAME` may name beside options.

        The value of each is the reason why such a setting has no effect; "": the engine gets it.
        """
        return {}

    def built(self, config: Config, layout: Layout) -> Built | None:
        """Return the limits of one of its own compiled engines; None for other files, or where no file says them.

        Raises EngineMismatchError for an engine whose description is damaged.
        """
        return None

    def quantize_of(self, layout: Layout) -> str | None:
        """The value of `option.quantize` that an engine was compiled with; None where its own files do not say it."""
        return None

    def prefix_cache(self, backend: Backend, hardware: Hardware) -> PrefixCache | None:
        """The engine's prefix cache where it is on by its own default, None where it is off."""
        return None

    def fitted_to_memory(self, config: Config, layout: Layout, hardware: Hardware, backend: Backend) -> Config:
        """The configuration with limits that fit the memory, where the user set none, and warnings of limits that do
        not.

        Raises ConfigError with option.strict_memory for what does not fit.
        """
        return config

    @abstractmethod
    def plan(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> EnginePlan:
        """Derive the plan, as `backends.planning.plan_engine` says."""


def backends() -> tuple[EngineBackend, ...]:
    """Return all backends, in the order in which `auto` asks them: those of other packages come last."""
    return tuple(dict.fromkeys(map(_load, _classes().values())))


def backend_named(name: Backend) -> EngineBackend:
    """Return the backend that a value of `option.backend` selects; not for `auto`."""
    return _load(_classes()[name.value])


def option_maps() -> dict[Backend, Effects]:
    """Return what options do, for each value of `option.backend`."""
    return {Backend(name): effects_on(Backend(name)) for name in _classes()}


def effects_on(backend: Backend) -> Effects:
    """Return what options do on a backend; what admission honours is an effect on each."""
    return with_admission(backend_named(backend).effects[backend.value])


def lacking(engine: str, version: str | None, oldest: str, install: str, *, has_gpu: bool, other: str = "") -> str:
    """The parts that a machine lacks for an engine of NVIDIA GPUs, "" where it lacks nothing.

    `install` is how to get the engine. `other` is another way to run it without a GPU.
    """
    problems = []
    if version is None:
        problems.append(f"{engine} is not installed ({install})")
    elif (release := release_of(version)) is not None and release < Version(oldest):
        problems.append(f"{engine} {version} is too old: {oldest} is the oldest that this server runs ({install})")
    if not has_gpu:
        needs = "" if version is None else f"{engine} {version} needs a GPU, and "
        problems.append(f"{needs}no NVIDIA GPU is visible (in a container: start it with --gpus all{other})")
    return "; ".join(problems)


def this_machine() -> Hardware:
    """Return the hardware of this machine now, and which engines are installed."""
    hardware = Hardware.probe()
    for backend in backends():
        hardware = backend.inspect(hardware)
    return hardware


def _classes() -> dict[str, str]:
    return _BUILT_IN | {name: path for name, path in plugins(BACKENDS).items() if name not in _BUILT_IN}


@cache
def _load(path: str) -> EngineBackend:
    try:
        backend: EngineBackend = resolve_name(path)()
    except Exception as error:
        raise EngineError(
            f"the entry point {path} in the group {BACKENDS} cannot be loaded ({type(error).__name__}: {error}): "
            "update or uninstall its package"
        ) from error
    return backend
