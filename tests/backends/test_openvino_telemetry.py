"""OpenVINO does not report to its vendor that it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["executor", "guide_process", "compile"])
def test_no_process_with_openvino_writes_an_identifier_for_its_vendor(module: str, tmp_path: Path) -> None:
    # CI is a reason for it to say nothing.
    environ = {name: value for name, value in os.environ.items() if name != "CI"} | {"HOME": str(tmp_path)}
    program = f"import djl_trtllm.backends.openvino.{module}, openvino, sys; print(sys.modules['openvino_telemetry'])"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr
    assert list(tmp_path.iterdir()) == []
