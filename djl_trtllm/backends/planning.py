"""Choosing the backend of a model, and deriving its plan."""

from __future__ import annotations

from typing import Protocol

from djl_trtllm.backends.openvino.plan import plan_openvino
from djl_trtllm.backends.scripted.plan import plan_scripted
from djl_trtllm.backends.select import choose_backend
from djl_trtllm.backends.tensorrt_llm.plan import plan_tensorrt_llm
from djl_trtllm.config import Backend, Config
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.model import Layout


class _Planner(Protocol):
    def __call__(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> EnginePlan: ...


_PLANNERS: dict[Backend, _Planner] = {
    Backend.OPENVINO: plan_openvino,
    Backend.SCRIPTED: plan_scripted,
    Backend.TENSORRT: plan_tensorrt_llm,
    Backend.PYTORCH: plan_tensorrt_llm,
    Backend.AUTODEPLOY: plan_tensorrt_llm,
}


def plan_engine(
    config: Config, layout: Layout, hardware: Hardware | None = None, *, compile_only: bool = False
) -> EnginePlan:
    """Derive the plan; reads headers of weight files, never weights. `hardware` defaults to this machine.

    With `compile_only` nothing is planned that depends on the machine that will run the engine. Raises EngineError
    where the backend cannot run here, EngineMismatchError for an engine that does not fit, ConfigError (all problems at
    once) for options that the backend cannot honour, and LayoutError for damaged weight files.
    """
    hardware = Hardware.probe() if hardware is None else hardware
    backend, reason = choose_backend(config, layout, hardware)
    return _PLANNERS[backend](config, layout, hardware, backend, reason, compile_only=compile_only)
