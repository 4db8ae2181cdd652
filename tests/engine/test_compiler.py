"""How a compiler's log is read."""

from __future__ import annotations

import pytest

from djl_trtllm.engine.compiler import Compiler
from djl_trtllm.engine.compilers import OPENVINO, TENSORRT_LLM

LABELS = [
    ("Loading Model: [1/3]\tDownloading HF model", "download"),
    ("Loading Model: [2/3]\tLoading HF model to memory", "convert"),
    ("Loading Model: [1/2]\tLoading TRT checkpoints to memory", "convert"),
    ("Starting quantization...", "quantize"),
    ("Loading Model: [3/3]\tBuilding TRT-LLM engine", "build"),
    ("[TRT-LLM] [I] Build TensorRT engine Unnamed Network 0", "build"),
]


@pytest.mark.parametrize(("line", "phase"), LABELS)
def test_tensorrt_llms_own_lines_tell_its_phases(line: str, phase: str) -> None:
    assert TENSORRT_LLM.phase_after("start", line) == phase


def test_a_phase_that_is_over_does_not_come_again() -> None:
    assert TENSORRT_LLM.phase_after("build", "Loading HF model to memory") is None
    assert TENSORRT_LLM.phase_after("build", "Build TensorRT engine Unnamed Network 1") is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out of GPU memory"),
        ("RuntimeError: Executor creation failed due to insufficient GPU memory.", "out of GPU memory"),
        ("[TRT] [E] Requested amount of GPU memory (17179869184 bytes) could not be allocated.", "out of GPU memory"),
        ("MemoryError", "out of host memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "out of host memory"),
        ("mpirun noticed that process rank 1 exited on signal 9 (Killed).", "out of host memory"),
        ("OSError: [Errno 28] No space left on device", "no space on the disk"),
        (
            "NotImplementedError: The given huggingface model architecture Foo is not supported in TRT-LLM yet",
            "unsupported architecture",
        ),
        ("AssertionError: Unsupported model architecture: FooForCausalLM", "unsupported architecture"),
        ("NotImplementedError: Unsupported quantization_config: {'quant_method': 'x'}", "unsupported quantisation"),
        ("ValueError: LLM got invalid argument: foo", "bad option"),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for TrtLlmArgs", "bad option"),
        ("AssertionError: Plugin gemm_plugin expects values in ['auto'], got fp4", "bad option"),
        ("ValueError: tp_size 2 is not consistent with the checkpoint's tp_size 4", "bad option"),
        ("ImportError: libnvinfer.so.10: cannot open shared object file", "versions that do not belong together"),
        ("RuntimeError: CUDA error: no kernel image is available", "versions that do not belong together"),
    ],
)
def test_a_failure_of_tensorrt_llm_is_classified(line: str, cause: str) -> None:
    found = TENSORRT_LLM.cause_of(["Traceback (most recent call last):", line, "  at the end"])
    assert found is not None
    assert (found[0].name, found[1]) == (cause, line)


def test_the_first_line_of_a_class_counts_and_the_gravest_class() -> None:
    lines = ["ValueError: a", "torch.OutOfMemoryError: CUDA out of memory", "RuntimeError: OutOfMemoryError in a rank"]
    found = TENSORRT_LLM.cause_of(lines)
    assert found is not None and found[1] == lines[1]


def test_what_is_not_known_is_not_classified() -> None:
    assert TENSORRT_LLM.cause_of(["RuntimeError: strange"]) is None


@pytest.mark.parametrize("compiler", [OPENVINO, TENSORRT_LLM])
def test_every_phase_that_is_told_by_lines_is_one(compiler: Compiler) -> None:
    assert set(compiler.phase_lines) <= set(compiler.phases)
    assert all(cause.advice for cause in compiler.causes)
