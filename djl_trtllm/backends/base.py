"""What a backend is: an engine that can run models, as one object in a folder of its own.

The folder also has the plan (an `EnginePlan`, which names the executor and the compiler), the executor with the names
of the request fields that it honours, and the option map. `backends/registry.py` lists the objects. Importing them
imports no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from djl_trtllm.backends.as_built import Built
from djl_trtllm.backends.effects import Effects
from djl_trtllm.config import Backend, Config
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.model import Layout


class Offer(NamedTuple):
    """A backend's answer to `option.backend=auto`.

    With a `backend`, `reason` says why it runs the model ("": for the reasons why others do not). Without one it says
    why not.
    """

    backend: Backend | None
    reason: str


class EngineBackend(ABC):
    """An engine under one or several values of `option.backend`."""

    effects: Mapping[str, Effects]
    """The values of `option.backend` that select it, each with its option map."""

    automatic: tuple[str, ...] = ()
    """Those of them that `auto` may select."""

    def inspect(self, hardware: Hardware) -> Hardware:
        """Add to this machine's hardware what is installed for the engine; imports no engine."""
        return hardware

    def suppose(self, hardware: Hardware) -> Hardware:
        """The hardware as if what the engine needs were installed, for plans of another machine."""
        return hardware

    @abstractmethod
    def accept(self, backend: Backend, setting: str, layout: Layout, hardware: Hardware) -> str:
        """Accept a model that the user assigns to `backend`, one of its names; returns the reason in one line.

        `setting` is the option with its value and origin. Raises EngineError if the engine cannot run here or cannot
        load these files.
        """

    def offer(self, layout: Layout, hardware: Hardware) -> Offer:
        """Whether `auto` may select it for these files on this machine; by default it never does.

        Raises EngineError where no other backend loads the files and this one cannot run here.
        """
        return Offer(None, "")

    def usual(self, hardware: Hardware) -> Backend | None:
        """What `auto` selects for a Hugging Face checkpoint on this machine; None: not this engine."""
        return None

    def built(self, config: Config, layout: Layout) -> Built | None:
        """What one of its own compiled engines was compiled for; None for other files, or where nothing says it.

        Raises EngineMismatchError for an engine whose description is damaged.
        """
        return None

    def fitted_to_memory(self, config: Config, layout: Layout, hardware: Hardware, backend: Backend) -> Config:
        """The configuration with limits that fit the memory, where the user set none, and warnings of what does not.

        Raises ConfigError with option.strict_memory for what does not fit.
        """
        return config

    @abstractmethod
    def plan(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> EnginePlan:
        """Derive the plan, see `backends.planning.plan_engine`."""
