from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.select import choose_backend
from djl_trtllm.backends.tensorrt_llm.backend import TensorRtLlmBackend
from djl_trtllm.config import Backend
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind, inspect
from tests.engines.helpers import CPU_ONLY, H200, configured, gpu_machine

GPU = gpu_machine("1.2.1")
NO_ENGINES = gpu_machine("1.3.0")
TENSORRT_KINDS = (ModelKind.TENSORRT_ENGINE, ModelKind.LMI_REPOSITORY, ModelKind.TENSORRT_CHECKPOINT)


@pytest.fixture
def hf(checkpoint: Path) -> Layout:
    return inspect(checkpoint)


def of_kind(kind: ModelKind, version: str | None = "1.2.0") -> Layout:
    return Layout(kind, Path("/models/it"), {} if version is None else {"version": version}, (), None)


@pytest.mark.parametrize(("files", "backend"), [(True, Backend.TENSORRT), (False, Backend.PYTORCH)])
@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
def test_the_files_of_tensorrt_llm_count_before_its_version(
    hf: Layout, version: str, files: bool, backend: Backend
) -> None:
    hardware = Hardware((H200,), version, 1, engine_backend=files)
    assert choose_backend(configured(), hf, hardware)[0] is backend


def test_auto_does_not_fall_back_to_the_cpu_because_tensorrt_llm_is_too_old(hf: Layout) -> None:
    with pytest.raises(EngineError, match=r"TensorRT-LLM 0\.21\.0 is too old \(install 1\.2"):
        choose_backend(configured(), hf, gpu_machine("0.21.0"))
    assert choose_backend(configured(backend="openvino"), hf, gpu_machine("0.21.0"))[0] is Backend.OPENVINO


@pytest.mark.parametrize("asked", ["tensorrt", "pytorch", "autodeploy"])
def test_tensorrt_llm_asked_for_where_it_is_not_says_what_is_missing_and_what_to_do(hf: Layout, asked: str) -> None:
    with pytest.raises(EngineError) as caught:
        choose_backend(configured(backend=asked), hf, CPU_ONLY)
    message = str(caught.value)
    assert message.startswith(f"option.backend={asked} (environment variable OPTION_BACKEND)")
    assert "TensorRT-LLM is not installed (pip install 'djl-trtllm[trtllm]'" in message
    assert "no NVIDIA GPU is visible" in message
    assert "option.backend=openvino" in message


def test_the_engine_backend_asked_for_where_tensorrt_llm_has_none_is_explained(hf: Layout) -> None:
    with pytest.raises(EngineError) as caught:
        choose_backend(configured(backend="tensorrt"), hf, NO_ENGINES)
    message = str(caught.value)
    assert "TensorRT-LLM 1.3.0 is installed: 1.3.0rc21 removed the backend" in message
    assert "option.backend=pytorch" in message and "TensorRT-LLM 1.2" in message
    for asked in ("pytorch", "autodeploy"):
        assert choose_backend(configured(backend=asked), hf, NO_ENGINES)[0] == asked


@pytest.mark.parametrize("kind", TENSORRT_KINDS)
def test_tensorrt_llms_own_files_need_it_and_never_openvino(kind: ModelKind) -> None:
    layout = of_kind(kind)
    assert choose_backend(configured(), layout, GPU) == (Backend.TENSORRT, f"/models/it is a {kind.value}")
    assert choose_backend(configured(backend="tensorrt"), layout, GPU)[0] is Backend.TENSORRT
    with pytest.raises(EngineError, match=f"{kind.value}, which needs TensorRT-LLM and a GPU"):
        choose_backend(configured(), layout, CPU_ONLY)
    with pytest.raises(EngineError, match="OpenVINO cannot load it"):
        choose_backend(configured(backend="openvino"), layout, GPU)


@pytest.mark.parametrize("kind", TENSORRT_KINDS)
@pytest.mark.parametrize("asked", ["pytorch", "autodeploy"])
@pytest.mark.parametrize("hardware", [GPU, NO_ENGINES])
def test_the_python_backends_read_hugging_face_checkpoints_only(
    kind: ModelKind, asked: str, hardware: Hardware
) -> None:
    with pytest.raises(EngineError, match=rf"option\.backend={asked} .*TensorRT-LLM's {asked} backend reads Hugging"):
        choose_backend(configured(backend=asked), of_kind(kind), hardware)


@pytest.mark.parametrize("asked", ["auto", "tensorrt"])
@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (of_kind(ModelKind.TENSORRT_ENGINE, "1.2.0"), "Serve it with TensorRT-LLM 1.2.0, which compiled it"),
        (of_kind(ModelKind.LMI_REPOSITORY, "0.11.0"), "Serve it with TensorRT-LLM 0.11.0, which compiled it"),
        (of_kind(ModelKind.TENSORRT_ENGINE, None), "Serve it with the TensorRT-LLM that compiled it, 1.2 or earlier"),
        (of_kind(ModelKind.TENSORRT_CHECKPOINT), "Compile and serve it with TensorRT-LLM 1.2 or 1.0"),
    ],
)
def test_an_engine_without_the_engine_backend_names_the_version_that_reads_it_and_the_alternative(
    layout: Layout, says: str, asked: str
) -> None:
    with pytest.raises(EngineError) as caught:
        choose_backend(configured(backend=asked), layout, NO_ENGINES)
    message = str(caught.value)
    assert "TensorRT-LLM 1.3.0 is installed: 1.3.0rc21 removed the backend" in message
    assert says in message
    assert "quantised by ModelOpt) with option.backend=pytorch" in message


def test_openvinos_engines_are_not_offered() -> None:
    offer = TensorRtLlmBackend().offer(of_kind(ModelKind.OPENVINO_ENGINE), GPU)
    assert offer == (None, f"TensorRT-LLM cannot load a {ModelKind.OPENVINO_ENGINE.value}")
