from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.openvino.backend import OpenVinoBackend
from djl_trtllm.backends.select import choose_backend
from djl_trtllm.config import Backend
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind, inspect
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine, write_engine_files

GPU = gpu_machine("1.2.1")
NO_ENGINES = gpu_machine("1.3.0")
TENSORRT_KINDS = (ModelKind.TENSORRT_ENGINE, ModelKind.LMI_REPOSITORY, ModelKind.TENSORRT_CHECKPOINT)


@pytest.fixture
def hf(checkpoint: Path) -> Layout:
    return inspect(checkpoint)


def of_kind(kind: ModelKind, version: str | None = "1.2.0") -> Layout:
    return Layout(kind, Path("/models/it"), {} if version is None else {"version": version}, (), None)


def test_an_engine_directory_names_its_own_backend(tmp_path: Path) -> None:
    layout = inspect(write_engine_files(tmp_path / "engine"))
    backend, reason = choose_backend(configured(), layout, GPU)
    assert backend is Backend.OPENVINO
    assert reason == f"{layout.path} is a compiled OpenVINO engine"
    with pytest.raises(EngineError, match=r"option\.backend=tensorrt .*serve it with option\.backend=openvino"):
        choose_backend(configured(backend="tensorrt"), layout, GPU)


def test_tensorrt_llms_files_are_offered_to_nobody_else() -> None:
    offer = OpenVinoBackend().offer(of_kind(ModelKind.TENSORRT_ENGINE), CPU_ONLY)
    assert offer == (None, f"OpenVINO cannot load a {ModelKind.TENSORRT_ENGINE.value}")


def test_a_checkpoint_is_run_for_the_reasons_why_others_do_not(hf: Layout) -> None:
    assert OpenVinoBackend().offer(hf, CPU_ONLY) == (Backend.OPENVINO, "")
    assert OpenVinoBackend().usual(CPU_ONLY) is Backend.OPENVINO
    assert (
        OpenVinoBackend().accept(Backend.OPENVINO, "option.backend=openvino", hf, CPU_ONLY) == "option.backend=openvino"
    )
