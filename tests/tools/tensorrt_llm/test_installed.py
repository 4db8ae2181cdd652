"""The checker against an installed package: the fake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from djl_trtllm.backends.tensorrt_llm.names import KNOWN_VERSIONS
from tests.fakes.installation import fake_tensorrt_llm

# Where the fake is not like the real one, and need not be.
SIMPLER_IN_THE_FAKE = {
    "generate_async": "takes any arguments and checks them against the table",
    "LoadFormat": "its members' values are text",
    "SpeculativeDecodingMode": "its members' values are text",
}


@pytest.mark.parametrize(
    "version",
    [pytest.param(version, marks=[] if version == "1.2.1" else [pytest.mark.slow]) for version in KNOWN_VERSIONS],
)
def test_the_fake_has_what_the_table_says(version: str, tmp_path: Path) -> None:
    """The same comparison as in a container: import, signatures, fields."""
    process = subprocess.run(
        [sys.executable, "-m", "tools.tensorrt_llm.check", "--installed"],
        env={**os.environ, **fake_tensorrt_llm(tmp_path, version=version)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"TensorRT-LLM {version}, imported from {tmp_path}" in process.stdout, process.stderr
    owner, different = "", set()
    for line in process.stdout.splitlines():
        owner = line.partition(":")[0] if not line.startswith(" ") else owner
        if line.startswith("  different"):
            different.add(owner)
    assert different <= SIMPLER_IN_THE_FAKE.keys(), process.stdout
    assert process.stdout.splitlines()[-1].endswith(" 0 not seen")
