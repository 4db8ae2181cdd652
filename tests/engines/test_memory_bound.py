"""A bound on engine processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from djl_trtllm.engines.hardware import available_memory
from djl_trtllm.engines.memory_bound import VARIABLE, bounded, engine_memory

GIB = 1 << 30
ALLOCATE = """import sys
from djl_trtllm.engines.memory_bound import apply_bound
apply_bound()
bytearray(int(sys.argv[1]))
print("allocated")"""


def allocate(size: int) -> str:
    done = subprocess.run([sys.executable, "-c", ALLOCATE, str(size)], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_a_process_with_a_bound_has_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with bounded(2 * GIB):
        assert engine_memory() == 2 * GIB
        assert allocate(GIB) == "allocated"
        assert allocate(3 * GIB) == "MemoryError"
    assert engine_memory() is None
    assert allocate(3 * GIB) == "allocated"


def test_a_bound_ends_with_its_block_and_the_one_around_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    with bounded(None):
        assert engine_memory() == 7
    with pytest.raises(ValueError, match="mine"), bounded(5):
        assert engine_memory() == 5
        raise ValueError("mine")
    assert engine_memory() == 7


@pytest.mark.parametrize("text", ["", "much", "-1"])
def test_what_is_no_number_is_no_bound(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert engine_memory() is None


def test_an_engine_is_planned_for_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    free = available_memory()
    with bounded(5_000_000):
        assert available_memory() == 5_000_000
    with bounded(1 << 60):
        assert available_memory() == pytest.approx(free, rel=0.5)
