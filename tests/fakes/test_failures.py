"""Aborts and failures: each test holds one rule of TensorRT-LLM, and names the section of the facts that it is from.

Rules without a section come from TensorRT-LLM's source, whose file is named.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until

from .observing import Observer, call, start


def test_an_abort_is_answered_late(observe: Observer, tiny_stories: Path, engine: Path) -> None:
    """§7.2: also in the context phase, after the last token, twice, and after the end."""
    script = {"steps_per_second": 100, "prefill_seconds": 0.1, "cancel_latency": 5}
    by_engine, by_torch, at_once, at_last, twice = observe(
        call("abort", which="engine", model=engine, after=3),
        call("abort", which="torch", model=tiny_stories, after=3),
        call("abort", which="engine", model=engine, after=0),
        call("abort", which="engine", model=engine, after=40),
        call("abort", which="engine", model=engine, after=2, twice=True),
        script=script,
    )
    # Three tokens were seen, and it takes five iterations more; PyTorch's ends the request before the last one's token.
    for seen, least in ((by_engine, 8), (by_torch, 7)):
        assert seen["reason"] == "cancelled"
        assert len(seen["tokens"]) >= least
        assert (seen["aborted"], seen["next"]) == (True, "length")
    assert [at_once["reason"], at_last["reason"], twice["reason"]] == ["cancelled", "length", "cancelled"]
    assert twice["next"] == "length"


def test_an_abort_in_the_queue(observe: Observer, tiny_stories: Path, engine: Path) -> None:
    """The engine looks at active requests only, so that it waits for a slot (executorImpl.cpp); the PyTorch backend
    drops it without an answer (executor_request_queue.py, `update_waiting_queue`)."""
    by_engine, by_torch = observe(
        call("abort_in_queue", which="engine", model=engine),
        call("abort_in_queue", which="torch", model=tiny_stories),
        script={"steps_per_second": 100},
    )
    assert (by_engine["before"], by_engine["after"], by_engine["next"]) == (False, "cancelled", "length")
    assert by_engine["tokens"] == []
    assert (by_torch["before"], by_torch["after"], by_torch["next"]) == (False, None, "length")


def test_an_abort_with_logprobs_crashes_the_engine_backend(
    tmp_path: Path, observe: Observer, tiny_stories: Path, engine: Path
) -> None:
    """§7.2: and with gathered logits the engine is in the caller's process."""
    arguments = {"after": 2, "logprobs": 1, "gather_generation_logits": True}
    script = {"steps_per_second": 50}
    process = start(tmp_path, call("abort", which="engine", model=engine, **arguments), script=script)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGSEGV
    seen = observe(call("abort", which="torch", model=tiny_stories, after=2, logprobs=1), script=script)
    assert seen["reason"] == "cancelled"


def test_an_abort_before_the_first_log_probability_cannot_be_read(observe: Observer, tiny_stories: Path) -> None:
    """`LogProbStorage` in llm_request.py (PyTorch): it has no sums before the first token."""
    script = {"steps_per_second": 100, "prefill_seconds": 0.4}
    seen = observe(call("abort", which="torch", model=tiny_stories, after=0, logprobs=1), script=script)
    assert seen == "AttributeError: 'LogProbStorage' object has no attribute 'cum_log_probs'"


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
def test_behind_a_dead_worker_everything_waits_for_ever(observe: Observer, tiny_stories: Path, version: str) -> None:
    """§7.3: requests are still taken, shutdown does not return, and the health check of 1.3 sees nothing."""
    answers = observe(
        call("dead_worker", model=tiny_stories, how="killed"),
        call("dead_worker", model=tiny_stories, how="stopped"),
        call("dead_worker", model=tiny_stories, how="killed", tensor_parallel_size=2),
        version=version,
        gpus=2,
        script={"steps_per_second": 100},
    )
    for seen in answers:
        assert (seen["waiting"], seen["after"], seen["shutdown"]) == ("hangs", "hangs", "hangs")
        assert seen.get("healthy") is (True if version == "1.3.0" else None)


def test_scripted_faults_hit_the_worker(observe: Observer, tiny_stories: Path) -> None:
    actions = ("die", "segfault", "stop", "hang")
    faults = [{"action": action, "at_token": 2, "max_new_tokens": 9 + n} for n, action in enumerate(actions)]
    calls = [
        call("requests", which="torch", model=tiny_stories, requests=asked, shut_down=False)
        for asked in ([{"max_tokens": 4}, {"max_tokens": 9 + n}] for n in range(len(actions)))
    ]
    for seen in observe(*calls, script={"faults": faults}):
        assert seen[0]["reason"] == "length"
        assert seen[1] == "hangs"


def test_an_error_of_the_engine_ends_the_worker_with_the_next_request(observe: Observer, tiny_stories: Path) -> None:
    """§7.3; worker.py: the thread that waits for responses keeps its error until then. Those that wait are not told,
    the request behind the next one gets the error, and afterwards the LLM is shut down."""
    # So slow that the responses before the error are read before it.
    script = {"steps_per_second": 10, "faults": [{"action": "raise", "at_token": 2, "max_new_tokens": 9}]}
    seen = observe(call("background_error", model=tiny_stories, ends_worker=False), script=script)
    assert seen["waiting"] == ["hangs", "hangs"]
    assert seen["next"].startswith("CppExecutorError: scripted engine failure")
    assert seen["then"] == "RuntimeError: LLM is shutting down"


def test_an_iteration_that_fails_fails_every_active_request_and_ends_the_loop_of_pytorch(
    observe: Observer, tiny_stories: Path, engine: Path
) -> None:
    """executorImpl.cpp goes on; py_executor.py only without the overlap scheduler and the guided decoder, whose next
    steps need the iteration's output. Afterwards requests are taken, and none is answered."""
    fault = {"action": "forward", "at_token": 2, "max_new_tokens": 9, "message": "a shape does not fit"}
    asked = [[{"max_tokens": 9}, {"max_tokens": 100}], [{"max_tokens": 3}]]
    plain = {"disable_overlap_scheduler": True}
    calls = [
        call("rounds", which="engine", model=engine, rounds=asked),
        call("rounds", which="torch", model=tiny_stories, rounds=asked),
        call("rounds", which="torch", model=tiny_stories, rounds=asked, **plain),
        call("rounds", which="torch", model=tiny_stories, rounds=asked, **plain, guided_decoding_backend="xgrammar"),
    ]
    seen = observe(*calls, script={"steps_per_second": 50, "faults": [fault]})
    for (first, second), _ in seen:
        assert first == second == "RequestError: a shape does not fit"
    by_engine, overlapped, plainly, guided = (after for _, (after,) in seen)
    assert by_engine["reason"] == plainly["reason"] == "length"
    assert overlapped == guided == "hangs"
    assert "Error in event loop: Sampling failed" in observe.printed


def test_a_guide_that_cannot_be_compiled(observe: Observer, tiny_stories: Path, engine: Path) -> None:
    """#9078: the error of its request, since November 2025 and on PyTorch. Before, its loop ended (guided_decoder.py);
    the C++ executor fails every active request (guidedDecoder.cpp)."""
    guide = {"class": "GuidedDecodingParams", "regex": "("}
    asked = [[{"max_tokens": 40}, {"max_tokens": 9, "guided_decoding": guide}], [{"max_tokens": 3}]]
    guides = {"guided_decoding_backend": "xgrammar"}
    by_torch, by_engine = (
        call("rounds", which="torch", model=tiny_stories, rounds=asked, **guides),
        call("rounds", which="engine", model=engine, rounds=asked, **guides),
    )
    for seen, own in zip(observe(by_torch, by_engine, script={"steps_per_second": 50}), (True, False), strict=True):
        (other, guided), (after,) = seen
        assert "Regex parsing error at position" in guided
        assert guided.startswith("RequestError: Guided decoding error: ") is own
        assert (other["reason"] == "length") if own else ("Regex parsing error" in other)
        assert after["reason"] == "length"
    (other, guided), (after,) = observe(by_torch, script={"steps_per_second": 50}, version="1.1.0")
    assert (other, guided, after) == ("hangs", "hangs", "hangs")


def test_llguidance_has_its_own_errors(observe: Observer, tiny_stories: Path) -> None:
    """grammar_matcher.py, `LLGuidanceMatcherFactory`"""
    guides = [{"class": "GuidedDecodingParams", "regex": "("}, {"class": "GuidedDecodingParams", "regex": "a+"}]
    asked = [[{"max_tokens": 9, "guided_decoding": guide} for guide in guides]]
    (bad, good), *_ = observe(
        call("rounds", which="torch", model=tiny_stories, rounds=asked, guided_decoding_backend="llguidance")
    )
    assert bad.startswith("RequestError: Guided decoding error: LLGuidance matcher error: at 1(8): invalid regex")
    assert good["reason"] in ("stop", "length")


def test_a_cuda_error_fails_every_active_request_and_all_that_follow(observe: Observer, engine: Path) -> None:
    """executorImpl.cpp"""
    script = {"steps_per_second": 50, "faults": [{"action": "cuda", "at_token": 2, "max_new_tokens": 9}]}
    asked = [[{"max_tokens": 9}, {"max_tokens": 100}], [{"max_tokens": 3}]]
    seen = observe(call("rounds", which="engine", model=engine, rounds=asked), script=script)
    assert all("an illegal memory access was encountered" in answer for answers in seen for answer in answers)


def test_after_shutdown(observe: Observer, tiny_stories: Path) -> None:
    """§7.1"""
    seen = observe(call("after_shutdown", model=tiny_stories))
    assert seen == {"error": "RuntimeError: LLM is shutting down", "left": []}


def test_every_rank_is_a_process_below_the_caller(observe: Observer, tiny_stories: Path) -> None:
    """§7.4"""
    one, two = observe(
        call("processes", model=tiny_stories),
        call("processes", model=tiny_stories, tensor_parallel_size=2),
        gpus=2,
    )
    assert one == {"ranks": 1, "parents": [True]}
    assert two == {"ranks": 2, "parents": [True, True]}


def test_the_entry_point_has_to_be_guarded(observe: Observer) -> None:
    """§7.4: a rank imports the main module."""
    assert "ensure that the llm.generate(...) method is guarded" in observe(call("unguarded"))


def test_no_rank_outlives_a_killed_caller(tmp_path: Path, tiny_stories: Path) -> None:
    process = start(tmp_path, call("be_killed", model=tiny_stories))
    printed, _ = process.communicate(timeout=120)
    pids = json.loads(printed.rstrip().rsplit("\n", 1)[-1])
    assert pids
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="the ranks' end")


def test_a_gpu_whose_memory_is_modelled_runs_out_of_it_where_the_real_one_does(
    observe: Observer, tiny_stories: Path
) -> None:
    """§5.1, §5.2; NVIDIA/TensorRT-LLM#2335 for requests; resource_manager.py for a KV cache that holds nothing."""
    gib = 1 << 30

    script = {"memory": {"weights": 16 * gib, "kv_cache": 131072, "loaded": 200_000}}

    def seen(max_num_tokens: int) -> str:
        made = call("construct", which="torch", model=tiny_stories, max_num_tokens=max_num_tokens)
        return str(observe(made, script=script, memory=24 * gib))

    assert seen(40_000) == "constructed"
    assert "Executor creation failed due to insufficient GPU memory." in seen(43_000)
    # All of it without a block of the KV cache.
    assert "Impossible to fit in any sequence in kvCache" in seen(42_949)
