"""What is known of the compilers: their logs, and what they need."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from djl_trtllm.backends.openvino.compiler import COMPILER as OPENVINO
from djl_trtllm.backends.tensorrt_llm.compiler import COMPILER as TENSORRT_LLM
from djl_trtllm.backends.tensorrt_llm.ranks import DIED
from djl_trtllm.engines.compiler import Compiler

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


# No line has two of the words that a class is known by: it would be found with either of them gone.
TENSORRT_FAILURES = [
    ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out of GPU memory"),
    ("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory", "out of GPU memory"),
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
    ("[TRT-LLM] [E] LLM got invalid argument: foo", "bad option"),
    ("pydantic_core._pydantic_core.ValidationError: 1 validation error for TrtLlmArgs", "bad option"),
    ("AssertionError: Plugin gemm_plugin expects values in ['auto'], got fp4", "bad option"),
    ("ValueError: tp_size 2 is not consistent with the checkpoint's tp_size 4", "bad option"),
    ("OSError: libnvinfer.so.10: cannot open shared object file", "versions that do not belong together"),
    ("ImportError: cannot import name 'LLM' from 'tensorrt_llm'", "versions that do not belong together"),
    ("RuntimeError: CUDA error: no kernel image is available", "versions that do not belong together"),
    ("ModuleNotFoundError: No module named 'tensorrt'", "versions that do not belong together"),
    ("symbol lookup error: undefined symbol: _ZN3c10", "versions that do not belong together"),
    ("CUDA driver version is insufficient for CUDA runtime version", "versions that do not belong together"),
    ("Cuda failure: 'system not yet initialized'", "versions that do not belong together"),
    ("[TRT] [E] Error Code 2: OutOfMemory (Cuda Runtime (out of memory))", "out of GPU memory"),
    ("RuntimeError: cudaErrorMemoryAllocation", "out of GPU memory"),
    ("RuntimeError: CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY", "out of GPU memory"),
    ("ValueError: quant_algo FP8 conflicting with quant_algo in the checkpoint", "unsupported quantisation"),
    ("TypeError: LLM.__init__() got an unexpected keyword argument 'foo'", "bad option"),
    ("ValueError: the checkpoint does not recognize this architecture", "unsupported architecture"),
]


@pytest.mark.parametrize(("line", "cause"), TENSORRT_FAILURES)
def test_a_failure_of_tensorrt_llm_is_classified(line: str, cause: str) -> None:
    found = TENSORRT_LLM.cause_of(["Traceback (most recent call last):", line, "  at the end"])
    assert found is not None
    assert (found[0].name, found[1]) == (cause, line)


def test_every_class_names_what_to_change() -> None:
    causes = (*TENSORRT_LLM.causes, *OPENVINO.causes)
    assert len(causes) > 8
    names = re.compile(r"config\.json|option\.\w+|`djl-trtllm config`|more memory|NVIDIA's container|give the machine")
    assert [cause.name for cause in causes if not names.search(cause.advice)] == []


@pytest.mark.parametrize("compiler", [OPENVINO, TENSORRT_LLM], ids=lambda compiler: compiler.module)
def test_what_is_not_known_is_not_classified(compiler: Compiler) -> None:
    assert compiler.cause_of(["RuntimeError: strange", "  MemoryError in a quoted line", "ran out of time"]) is None


def test_a_rank_that_died_is_a_class() -> None:
    found = TENSORRT_LLM.cause_of([f"{DIED} (process 7)"])
    assert found is not None and found[0].name == "a rank died"


def test_a_cause_counts_before_what_came_of_it() -> None:
    lines = ["ValueError: a", "torch.OutOfMemoryError: CUDA out of memory", f"{DIED} (process 7)"]
    found = TENSORRT_LLM.cause_of(lines)
    assert found is not None and found[1] == lines[1]


def test_the_compilers_are_modules_that_say_what_they_need() -> None:
    assert {
        compiler.module: (compiler.packages, compiler.install.split(", ")[0], compiler.phases)
        for compiler in (OPENVINO, TENSORRT_LLM)
    } == {
        "djl_trtllm.backends.openvino.compile": (
            ("torch", "openvino", "openvino-tokenizers", "optimum-intel", "nncf"),
            "pip install 'djl-trtllm[compile]'",
            ("load", "convert", "compress", "tokenizer", "save"),
        ),
        "djl_trtllm.backends.tensorrt_llm.compile": (
            ("tensorrt-llm",),
            "pip install 'djl-trtllm[trtllm]'",
            ("start", "download", "convert", "quantize", "build", "save"),
        ),
    }
    for compiler in (OPENVINO, TENSORRT_LLM):
        assert find_spec(compiler.module) is not None
        assert set(compiler.phase_lines) <= set(compiler.phases)


def test_tensorrt_llms_own_cache_is_off() -> None:
    assert TENSORRT_LLM.environment == {"TLLM_LLMAPI_BUILD_CACHE": "0"}
