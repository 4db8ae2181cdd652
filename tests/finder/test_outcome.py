"""Out of memory, or something else."""

from __future__ import annotations

import pytest

from djl_trtllm.engines.compiler import DISK, GPU_MEMORY, HOST_MEMORY
from djl_trtllm.finder.outcome import Failure, Outcome, Phase, classify, doing, is_crash

KILLED = "the engine process (pid 7) is gone: it was killed by SIGKILL (the kernel does that when memory runs out)"
BUILD_KILLED = "the compiler ended with signal SIGKILL (out of memory?) in phase build"


@pytest.mark.parametrize(
    "message",
    [
        # TensorRT-LLM: PyTorch's worker, the C++ runtime at load and in a request (tensorrtllm_backend #281, #2335).
        "RuntimeError: Executor creation failed due to insufficient GPU memory.\n\nThe following component ...",
        "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, mCudaStream->get()): out of memory "
        "(/app/tensorrt_llm/cpp/tensorrt_llm/runtime/tllmBuffers.h:112)",
        "Encountered an error in forwardAsync function: [TensorRT-LLM][ERROR] CUDA runtime error in "
        "::cudaMallocAsync(ptr, n, mMemPool->getPool(), mCudaStream->get()): out of memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 21 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "AssertionError: Impossible to fit in any sequence in kvCache",
        "[TensorRT-LLM][ERROR] maxTokensInPagedKvCache must be large enough to process at least 1 sequence to "
        "completion",
        # The host's.
        "RuntimeError: std::bad_alloc",
        "MemoryError: bad allocation",
        "OSError: [Errno 12] Cannot allocate memory",
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory",
        "Check 'ptr' failed at src/plugins/intel_cpu/src/cpu_memory.cpp:257:\nFailed to allocate 46137344 bytes of "
        "memory",
        "[CPU] FullyConnected node with name '__module.lm_head/ov_ext::linear/MatMul' can't alloc",
        "1 configuration problem:\n  - one sequence of 8192 tokens needs 16.8 GB of KV cache and 1.2 GB of memory are "
        "available: lower option.max_input_len",
    ],
)
@pytest.mark.parametrize("phase", ["load", "requests"])
def test_memory_has_run_out(message: str, phase: Phase) -> None:
    outcome = classify(Failure(phase, message))
    assert (outcome.kind, outcome.phase) == ("memory", phase)
    assert outcome.reason in message
    assert "\n" not in outcome.reason


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: Only 2 GPUs are available, but 4 are required.",
        "NotImplementedError: The given huggingface model architecture X is not supported in TRT-LLM yet",
        "the engine was not loaded within 600 seconds (option.model_loading_timeout)",
        "CUDA runtime error in cudaEventSynchronize(get()): an illegal memory access was encountered",
        "Resource temporarily unavailable",
        "silent for 60 seconds (option.executor_hang_timeout)",
        "model.safetensors is damaged: 12 bytes are missing",
    ],
)
def test_all_else_is_another_failure_with_its_whole_text(message: str) -> None:
    outcome = classify(Failure("load", message))
    assert (outcome.kind, outcome.reason) == ("failed", message)


@pytest.mark.parametrize("phase", ["build", "load", "requests"])
def test_a_kill_is_a_lack_of_memory_only_if_the_kernel_says_so(phase: Phase) -> None:
    outcome = classify(Failure(phase, KILLED, oom_kills=1))
    assert outcome.kind == "memory"
    assert "OOM killer" in outcome.reason and doing(phase) in outcome.reason
    other = classify(Failure(phase, KILLED))
    assert other.kind == "failed"
    assert other.reason.startswith(KILLED) and "somebody else" in other.reason


def test_a_trial_whose_own_process_is_killed() -> None:
    killed = Failure("requests", "the trial was killed by SIGKILL", status=-9, oom_kills=2)
    assert classify(killed).kind == "memory"
    other = classify(Failure("requests", "the trial was killed by SIGKILL", status=-9))
    assert (other.kind, other.reason) == ("failed", "the trial's process ended with status -9 while answering requests")


def test_a_failed_build_has_its_cause() -> None:
    text = "the compiler ended with status 1 in phase build"
    assert classify(Failure("build", text, GPU_MEMORY.name)).kind == "memory"
    assert classify(Failure("build", text, HOST_MEMORY.name)).kind == "memory"
    # A log may have any words: what the compiler's own reader found in it is right.
    assert (
        classify(Failure("build", f"{text}\nwarming up, out of memory tactics are skipped", DISK.name)).kind == "failed"
    )


def test_a_build_that_was_killed_is_a_lack_of_memory_only_if_the_kernel_says_so() -> None:
    assert classify(Failure("build", BUILD_KILLED, HOST_MEMORY.name)).kind == "failed"
    assert classify(Failure("build", BUILD_KILLED, HOST_MEMORY.name, oom_kills=1)).kind == "memory"


@pytest.mark.parametrize("message", ["Resource temporarily unavailable", "RuntimeError: can't start new thread"])
def test_below_a_bound_a_thread_without_a_stack_is_a_lack_of_memory(message: str) -> None:
    assert classify(Failure("load", message, bounded=True)).kind == "memory"
    assert classify(Failure("load", message)).kind == "failed"


def test_a_crash_is_a_signal_of_a_program_that_went_wrong() -> None:
    assert is_crash(Outcome("failed", "load", "it was killed by SIGSEGV"))
    assert is_crash(Outcome("failed", "load", "the trial's process ended with status -6 while loading the engine"))
    assert not is_crash(Outcome("failed", "load", "it was killed by SIGKILL"))
    assert not is_crash(Outcome("memory", "load", "SIGSEGV"))


def test_a_signal_has_its_name_or_its_number() -> None:
    for message in ("it ended with signal 9", "it was killed by SIGKILL"):
        assert "somebody else" in classify(Failure("load", message)).reason
    assert classify(Failure("load", "it ended with signal 99")).reason == "it ended with signal 99"
