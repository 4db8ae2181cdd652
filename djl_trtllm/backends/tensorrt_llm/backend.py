"""TensorRT-LLM as a backend, under three names: its engine backend, its PyTorch backend and AutoDeploy.

The installed package is found without importing it: an import takes seconds and starts MPI.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from djl_trtllm.backends.base import Built, EngineBackend, Offer, PrefixCache, lacking
from djl_trtllm.backends.effects import Effects
from djl_trtllm.backends.installed import folder_of, version_of
from djl_trtllm.backends.tensorrt_llm.arguments import ENGINE, PYTORCH, method_of
from djl_trtllm.backends.tensorrt_llm.built_engine import built_limits, read_built_engine
from djl_trtllm.backends.tensorrt_llm.limits import SUPPOSED_VERSION, fitted_to_memory, planned_version
from djl_trtllm.backends.tensorrt_llm.names import has
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtLlmPlan, plan_tensorrt_llm
from djl_trtllm.config import Backend, Config, Task
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind
from djl_trtllm.model.pooling import find_task

_TENSORRT_PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
_VERSION_LINE = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def _version(package: Path) -> str:
    if (installed := version_of("tensorrt-llm")) is not None:
        return installed[1]
    try:
        line = _VERSION_LINE.search((package / "version.py").read_text(encoding="utf-8"))
    except OSError:
        line = None
    return "of unknown version" if line is None else line[1]


_ENGINES = (ModelKind.TENSORRT_ENGINE, ModelKind.LMI_REPOSITORY)
_OWN_FILES = (*_ENGINES, ModelKind.TENSORRT_CHECKPOINT)
_SCORED = "BertForSequenceClassification"
"""The only encoder among TensorRT-LLM's PyTorch models (`_torch/models/_arch_index.py` of about 1.4)."""
_OLDEST = "1.0.0rc0"
_INSTALL = "pip install 'djl-trtllm[trtllm]', or use its container"
_REMOVED = "1.3.0rc21 removed the backend that compiles and runs TensorRT engines"


class TensorRtLlmBackend(EngineBackend):
    """The `EngineBackend` of TensorRT-LLM; only `tensorrt` loads engines, and checkpoints of its own format."""

    effects: Mapping[str, Effects] = MappingProxyType(
        {Backend.TENSORRT.value: ENGINE, Backend.PYTORCH.value: PYTORCH, Backend.AUTODEPLOY.value: PYTORCH}
    )
    automatic = (Backend.TENSORRT.value, Backend.PYTORCH.value)
    tasks = frozenset({Task.GENERATE, Task.SCORE})

    def inspect(self, hardware: Hardware) -> Hardware:
        package, tensorrt = folder_of("tensorrt_llm"), version_of(*_TENSORRT_PACKAGES)
        return replace(
            hardware,
            tensorrt_llm=None if package is None else _version(package),
            tensorrt=None if tensorrt is None else tensorrt[1],
            engine_backend=None if package is None else any(package.glob("_tensorrt_engine*")),
            autodeploy=None if package is None else any(package.glob("_torch/auto_deploy*")),
        )

    def suppose(self, hardware: Hardware) -> Hardware:
        return hardware if hardware.tensorrt_llm else replace(hardware, tensorrt_llm=SUPPOSED_VERSION)

    def accept(self, backend: Backend, setting: str, layout: Layout, hardware: Hardware) -> str:
        what = f"{layout.path} is a {layout.kind.value}"
        if layout.kind in _OWN_FILES:
            if backend is not Backend.TENSORRT:
                raise EngineError(
                    f"{setting}: {what}, and TensorRT-LLM's {backend} backend reads Hugging Face checkpoints only; set "
                    "option.backend=tensorrt (or auto), or serve the Hugging Face checkpoint it was made from"
                )
            return _own_files(what, layout, hardware)
        if layout.kind is not ModelKind.HF_CHECKPOINT:
            raise EngineError(
                f"{setting}: {what}; serve it with option.backend=openvino (or auto), or serve the checkpoint with "
                f"option.backend={backend}"
            )
        _require(setting, hardware)
        if problem := _unscored(backend, layout, hardware):
            raise EngineError(f"{setting}: {problem}")
        if backend is Backend.TENSORRT and not hardware.has_engine_backend:
            raise EngineError(
                f"{setting} and TensorRT-LLM {hardware.tensorrt_llm} is installed: {_REMOVED}. Serve the checkpoint "
                "with option.backend=pytorch (or auto), or use TensorRT-LLM 1.2"
            )
        if backend is Backend.AUTODEPLOY and hardware.autodeploy is False:
            raise EngineError(
                f"{setting} and TensorRT-LLM {hardware.tensorrt_llm} is installed, which has no AutoDeploy any more. "
                "Serve the checkpoint with option.backend=pytorch (or auto), or use TensorRT-LLM 1.3"
            )
        return setting

    def offer(self, layout: Layout, hardware: Hardware) -> Offer:
        if layout.kind in _OWN_FILES:
            what = f"{layout.path} is a {layout.kind.value}"
            return Offer(Backend.TENSORRT, _own_files(what, layout, hardware))
        if layout.kind is not ModelKind.HF_CHECKPOINT:
            return Offer(None, f"TensorRT-LLM cannot load a {layout.kind.value}")
        if hardware.tensorrt_llm is None:
            return Offer(None, "TensorRT-LLM is not installed" + ("" if hardware.gpus else ", and there is no GPU"))
        installed = f"TensorRT-LLM {hardware.tensorrt_llm} is installed"
        if not hardware.gpus:
            return Offer(None, f"{installed}, but there is no GPU")
        if find_task(Task.AUTO, layout) is Task.SCORE:
            problem = _unscored(Backend.PYTORCH, layout, hardware)
            return Offer(None, problem) if problem else Offer(Backend.PYTORCH, f"{installed} and there is a GPU")
        _require("there is a GPU", hardware)
        if hardware.has_engine_backend:
            return Offer(Backend.TENSORRT, f"{installed} and there is a GPU")
        return Offer(Backend.PYTORCH, f"{installed}, which has no engine backend, and there is a GPU")

    def usual(self, hardware: Hardware) -> Backend | None:
        if hardware.tensorrt_llm is None or not hardware.gpus:
            return None
        return Backend.TENSORRT if hardware.has_engine_backend else Backend.PYTORCH

    def built(self, config: Config, layout: Layout) -> Built | None:
        if layout.kind not in _ENGINES or layout.engine_dir is None:
            return None
        return built_limits(config, read_built_engine(layout.engine_dir))

    def quantize_of(self, layout: Layout) -> str | None:
        method = method_of(layout.quantization)
        return None if method is None else method.value

    def prefix_cache(self, backend: Backend, hardware: Hardware) -> PrefixCache | None:
        if backend is not Backend.PYTORCH:
            return None
        version = planned_version(hardware)
        return PrefixCache(f"TensorRT-LLM {version}", separate=has("generate_async", "cache_salt", version))

    def fitted_to_memory(self, config: Config, layout: Layout, hardware: Hardware, backend: Backend) -> Config:
        return fitted_to_memory(config, layout, hardware, backend)

    def plan(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> TensorRtLlmPlan:
        return plan_tensorrt_llm(config, layout, hardware, backend, reason)


def _unscored(backend: Backend, layout: Layout, hardware: Hardware) -> str:
    """The reason why a cross-encoder is not served; "" for one that is, and for other models."""
    if find_task(Task.AUTO, layout) is not Task.SCORE:
        return ""
    version, architecture = planned_version(hardware), layout.shape.architecture
    if not has("LLM", "encode", version):
        return f"TensorRT-LLM {version} has no LLM.encode, by which pairs of texts are scored"
    if architecture != _SCORED:
        return f"TensorRT-LLM {version} scores pairs of texts with {_SCORED}, and the model is {architecture}"
    return "" if backend is Backend.PYTORCH else "pairs of texts are scored with option.backend=pytorch"


def _own_files(what: str, layout: Layout, hardware: Hardware) -> str:
    _require(what, hardware)
    if not hardware.has_engine_backend:
        raise EngineError(
            f"{what}, and TensorRT-LLM {hardware.tensorrt_llm} is installed: {_REMOVED}. {_reader(layout)}, or serve "
            "the Hugging Face checkpoint it was made from (it may be quantised by ModelOpt) with option.backend=pytorch"
        )
    return what


def _reader(layout: Layout) -> str:
    if layout.kind is ModelKind.TENSORRT_CHECKPOINT:
        return "Compile and serve it with TensorRT-LLM 1.2 or 1.0"
    version = (layout.config or {}).get("version")
    if version is None:
        return "Serve it with the TensorRT-LLM that compiled it, 1.2 or earlier"
    return f"Serve it with TensorRT-LLM {version}, which compiled it: an engine is read by its own release only"


def _require(why: str, hardware: Hardware) -> None:
    problems = lacking("TensorRT-LLM", hardware.tensorrt_llm, _OLDEST, _INSTALL, has_gpu=bool(hardware.gpus))
    if problems:
        raise EngineError(
            f"{why}, which needs TensorRT-LLM and a GPU: {problems}. Or serve a Hugging Face checkpoint on the CPU "
            "with option.backend=openvino"
        )
