"""How failures of OpenVINO's export are classified."""

from __future__ import annotations

import pytest

from djl_trtllm.backends.openvino.compiler import COMPILER

FAILURES = [
    ("RuntimeError: std::bad_alloc", "out of host memory"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", "out of host memory"),
    ("OSError: [Errno 122] Disk quota exceeded", "no space on the disk"),
    (
        "ValueError: Trying to export a foo model, that is a custom or unsupported architecture",
        "unsupported architecture",
    ),
    ("ValueError: Transformers does not recognize this architecture", "unsupported architecture"),
]


@pytest.mark.parametrize(("line", "cause"), FAILURES)
def test_a_failure_of_openvinos_export_is_classified(line: str, cause: str) -> None:
    found = COMPILER.cause_of([line])
    assert found is not None and found[0].name == cause
