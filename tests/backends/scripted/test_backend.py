from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.scripted.backend import ScriptedBackend
from djl_trtllm.backends.select import choose_backend
from djl_trtllm.config import Backend
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


def test_scripted_needs_nothing(hf: Layout) -> None:
    assert choose_backend(configured(backend="scripted"), hf, CPU_ONLY)[0] is Backend.SCRIPTED


def test_auto_never_selects_it(hf: Layout) -> None:
    backend = ScriptedBackend()
    assert (backend.offer(hf, CPU_ONLY), backend.usual(CPU_ONLY)) == ((None, ""), None)
