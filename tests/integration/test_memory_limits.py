"""What does not fit is reported before anything is compiled, and refused on request; what fits is chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.helpers import write_checkpoint
from tests.fakes.installation import fake_tensorrt_llm

TIGHT = 1 << 30
"""Less than a TensorRT engine takes for itself."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def run(tmp_path: Path, memory: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = fake_tensorrt_llm(tmp_path / "machine", gpu_name="NVIDIA A10G", memory=memory)
    return subprocess.run(
        [sys.executable, "-m", "djl_trtllm.cli", *arguments],
        env={**os.environ, **environ, "OPTION_ENGINE_CACHE_DIR": str(tmp_path / "cache"), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_does_not_fit_is_a_warning_before_the_build(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    compiled = run(tmp_path, TIGHT, "compile", str(checkpoint), str(tmp_path / "out"))
    assert compiled.returncode == 0, compiled.stderr
    warning = compiled.stderr.index("does not fit: out of memory is expected on NVIDIA A10G, tp 1")
    assert warning < compiled.stderr.index("compiling: ")


def test_strict_memory_refuses_it_and_compiles_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    served = run(tmp_path, TIGHT, "serve", str(checkpoint), "--strict-memory", SERVING_INFERENCE_PORT="0")
    assert served.returncode == 1
    assert "does not fit: out of memory is expected on NVIDIA A10G, tp 1" in served.stderr
    assert "OPTION_STRICT_MEMORY" in served.stderr
    assert "compiling: " not in served.stderr
    assert list((tmp_path / "cache").glob("tensorrt-*")) == []


def test_an_engine_is_compiled_for_what_fits_and_keeps_it(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    memory = 23028 << 20
    out = tmp_path / "out"
    compiled = run(tmp_path, memory, "compile", str(checkpoint), str(out), "--max_rolling_batch_size=16")
    assert compiled.returncode == 0, compiled.stderr
    assert json.loads((out / "config.json").read_text())["build_config"]["max_num_tokens"] == 16 * 256
    assert "max_num_tokens" not in (out / "serving.properties").read_text()
    shown = run(tmp_path, memory, "config", str(out), "--json")
    option = json.loads(shown.stdout)["options"]["max_num_tokens"]
    assert option["value"] == 16 * 256 and "build_config in" in option["origin"]["text"]
