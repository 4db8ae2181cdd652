from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends import registry
from djl_trtllm.backends.registry import backend_named
from djl_trtllm.backends.select import choose_backend, likely_backend
from djl_trtllm.config import Backend
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind, inspect
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine

GPU = gpu_machine("1.2.1")
NO_ENGINES = gpu_machine("1.3.0")
TENSORRT_KINDS = (ModelKind.TENSORRT_ENGINE, ModelKind.LMI_REPOSITORY, ModelKind.TENSORRT_CHECKPOINT)


@pytest.fixture
def hf(checkpoint: Path) -> Layout:
    return inspect(checkpoint)


def of_kind(kind: ModelKind, version: str | None = "1.2.0") -> Layout:
    return Layout(kind, Path("/models/it"), {} if version is None else {"version": version}, (), None)


@pytest.mark.parametrize(
    ("hardware", "backend", "reason"),
    [
        (CPU_ONLY, Backend.OPENVINO, "TensorRT-LLM is not installed, and there is no GPU"),
        (gpu_machine(None), Backend.OPENVINO, "TensorRT-LLM is not installed"),
        (gpu_machine("1.2.1", 0), Backend.OPENVINO, "TensorRT-LLM 1.2.1 is installed, but there is no GPU"),
        (GPU, Backend.TENSORRT, "TensorRT-LLM 1.2.1 is installed and there is a GPU"),
        (gpu_machine("1.0.0"), Backend.TENSORRT, "TensorRT-LLM 1.0.0 is installed and there is a GPU"),
        (gpu_machine("1.3.0rc20"), Backend.TENSORRT, "TensorRT-LLM 1.3.0rc20 is installed and there is a GPU"),
        (
            gpu_machine("1.3.0rc21"),
            Backend.PYTORCH,
            "TensorRT-LLM 1.3.0rc21 is installed, which has no engine backend, and there is a GPU",
        ),
        (
            NO_ENGINES,
            Backend.PYTORCH,
            "TensorRT-LLM 1.3.0 is installed, which has no engine backend, and there is a GPU",
        ),
        (
            gpu_machine("of unknown version"),
            Backend.TENSORRT,
            "TensorRT-LLM of unknown version is installed and there is a GPU",
        ),
    ],
)
def test_auto_takes_the_best_backend_that_is_here(
    hf: Layout, hardware: Hardware, backend: Backend, reason: str
) -> None:
    assert choose_backend(configured(), hf, hardware) == (backend, reason)
    assert likely_backend(configured(), hardware) is backend


@pytest.mark.parametrize("asked", ["tensorrt", "pytorch", "autodeploy", "openvino"])
def test_what_was_asked_for_is_the_reason(hf: Layout, asked: str) -> None:
    reason = f"option.backend={asked} (environment variable OPTION_BACKEND)"
    assert choose_backend(configured(backend=asked), hf, GPU) == (asked, reason)


@pytest.mark.parametrize("rolling_batch", ["auto", "trtllm", "disable"])
def test_the_rolling_batch_of_djl_serving_chooses_nothing(hf: Layout, rolling_batch: str) -> None:
    assert choose_backend(configured(rolling_batch=rolling_batch), hf, GPU)[0] is Backend.TENSORRT
    assert choose_backend(configured(rolling_batch=rolling_batch), hf, CPU_ONLY)[0] is Backend.OPENVINO


def test_without_a_backend_for_the_files_every_reason_is_named(hf: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKENDS", [backend_named(Backend.TENSORRT), backend_named(Backend.SCRIPTED)])
    with pytest.raises(EngineError, match=r"no backend runs .*: TensorRT-LLM is not installed, and there is no GPU$"):
        choose_backend(configured(), hf, CPU_ONLY)


def test_a_backend_that_was_chosen_is_the_likely_one() -> None:
    assert likely_backend(configured(backend="autodeploy"), CPU_ONLY) is Backend.AUTODEPLOY
