from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.config import Backend
from djl_trtllm.engine import Hardware, choose_backend
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Kind, Layout, inspect

from .helpers import CPU_ONLY, configured, write_engine_files

GPU = Hardware(gpus=1, tensorrt_llm="1.2.0", available_memory=8 * 10**9)


@pytest.fixture
def hf(checkpoint: Path) -> Layout:
    return inspect(checkpoint)


@pytest.mark.parametrize(
    ("hardware", "backend", "reason"),
    [
        (CPU_ONLY, Backend.OPENVINO, "TensorRT-LLM is not installed, and there is no GPU"),
        (Hardware(1, None, 1), Backend.OPENVINO, "TensorRT-LLM is not installed"),
        (Hardware(0, "1.2.0", 1), Backend.OPENVINO, "TensorRT-LLM 1.2.0 is installed, but there is no GPU"),
        (GPU, Backend.TENSORRT, "TensorRT-LLM 1.2.0 is installed and there is a GPU"),
    ],
)
def test_auto_takes_tensorrt_llm_where_it_is_installed_and_a_gpu_is_there(
    hf: Layout, hardware: Hardware, backend: Backend, reason: str
) -> None:
    assert choose_backend(configured(), hf, hardware) == (backend, reason)


def test_an_engine_directory_names_its_own_backend(tmp_path: Path) -> None:
    layout = inspect(write_engine_files(tmp_path / "engine"))
    backend, reason = choose_backend(configured(), layout, GPU)
    assert backend is Backend.OPENVINO
    assert reason == f"{layout.path} is a compiled OpenVINO engine"
    with pytest.raises(EngineError, match=r"option\.backend=tensorrt .*serve it with option\.backend=openvino"):
        choose_backend(configured(backend="tensorrt"), layout, GPU)


def test_what_was_asked_for_is_the_reason(hf: Layout) -> None:
    backend, reason = choose_backend(configured(backend="openvino"), hf, GPU)
    assert backend is Backend.OPENVINO
    assert reason == "option.backend=openvino (environment variable OPTION_BACKEND)"


@pytest.mark.parametrize("asked", ["tensorrt", "pytorch", "autodeploy"])
def test_tensorrt_llm_asked_for_where_it_is_not_says_what_is_missing_and_what_to_do(hf: Layout, asked: str) -> None:
    with pytest.raises(EngineError) as caught:
        choose_backend(configured(backend=asked), hf, CPU_ONLY)
    message = str(caught.value)
    assert message.startswith(f"option.backend={asked} (environment variable OPTION_BACKEND)")
    assert "TensorRT-LLM is not installed (pip install 'djl-trtllm[trtllm]'" in message
    assert "no NVIDIA GPU is visible" in message
    assert "option.backend=openvino" in message


def test_a_tensorrt_engine_needs_tensorrt_llm_and_never_openvino(tmp_path: Path) -> None:
    layout = Layout(Kind.TENSORRT_ENGINE, tmp_path, {}, (), None)
    assert choose_backend(configured(), layout, GPU)[0] is Backend.TENSORRT
    with pytest.raises(EngineError, match="compiled TensorRT-LLM engine, which needs TensorRT-LLM and a GPU"):
        choose_backend(configured(), layout, CPU_ONLY)
    with pytest.raises(EngineError, match="OpenVINO cannot load it"):
        choose_backend(configured(backend="openvino"), layout, GPU)


def test_scripted_needs_nothing(hf: Layout) -> None:
    assert choose_backend(configured(backend="scripted"), hf, CPU_ONLY)[0] is Backend.SCRIPTED
