"""OpenVINO as a backend: on the CPU, for Hugging Face checkpoints and its own compiled engines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from djl_trtllm.backends.as_built import Built
from djl_trtllm.backends.base import EngineBackend, Offer
from djl_trtllm.backends.effects import Effects
from djl_trtllm.backends.openvino.engine_limits import built_limits
from djl_trtllm.backends.openvino.options import EFFECTS
from djl_trtllm.backends.openvino.plan import OpenVinoPlan, plan_openvino
from djl_trtllm.config import Backend, Config
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind

_LOADED = (ModelKind.HF_CHECKPOINT, ModelKind.OPENVINO_ENGINE)


class OpenVinoBackend(EngineBackend):
    """See `EngineBackend`."""

    effects: Mapping[str, Effects] = MappingProxyType({Backend.OPENVINO.value: EFFECTS})
    automatic = (Backend.OPENVINO.value,)

    def accept(self, backend: Backend, setting: str, layout: Layout, hardware: Hardware) -> str:
        if layout.kind not in _LOADED:
            raise EngineError(
                f"{setting}: {layout.path} is a {layout.kind.value}, and OpenVINO cannot load it; serve the Hugging "
                "Face checkpoint it was made from"
            )
        return _own_engine(layout) or setting

    def offer(self, layout: Layout, hardware: Hardware) -> Offer:
        if layout.kind not in _LOADED:
            return Offer(None, f"OpenVINO cannot load a {layout.kind.value}")
        return Offer(Backend.OPENVINO, _own_engine(layout))

    def usual(self, hardware: Hardware) -> Backend:
        return Backend.OPENVINO

    def built(self, config: Config, layout: Layout) -> Built | None:
        return built_limits(config, layout.path) if layout.kind is ModelKind.OPENVINO_ENGINE else None

    def plan(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> OpenVinoPlan:
        return plan_openvino(config, layout, hardware, backend, reason, compile_only=compile_only)


def _own_engine(layout: Layout) -> str:
    return f"{layout.path} is a {layout.kind.value}" if layout.kind is ModelKind.OPENVINO_ENGINE else ""
