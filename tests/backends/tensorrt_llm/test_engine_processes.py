"""Requests to TensorRT-LLM in real host processes; TensorRT-LLM is the fake."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from djl_trtllm.backends.json_grammar import guide_arguments
from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.executor import client
from djl_trtllm.executor.protocol import Feature, Refusal
from djl_trtllm.model import Tokenizer
from djl_trtllm.processes import oom_kills
from djl_trtllm.request import Adapter, FinishReason, Guide, GuideKind
from tests.backends.tensorrt_llm.kit import BACKENDS, LONG, PROMPT, Machine, in_processes, rank
from tests.executor.kit import Probe, run_checked
from tests.fakes import installation
from tests.support.models import write_adapter
from tests.support.tables import by_table

pytestmark = pytest.mark.slow


def copied(model: Path, to: Path, file: str, **changes: Any) -> Path:
    """The model elsewhere, with changes in one of its JSON files."""
    copy = Path(shutil.copytree(model, to / "model"))
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps(content | changes))
    return copy


# -- what is asked of TensorRT-LLM -------------------------------------------------------------------------------------


@in_processes
async def test_guides_adapters_and_beams_reach_the_engine(
    machine: Machine, tmp_path: Path, tokenizer: Tokenizer
) -> Probe:
    adapter = write_adapter(tmp_path / "adapter")
    guide = Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}')
    guided = [*tokenizer.encode("{}", False), *tokenizer.end_ids]

    probe = await machine.start(
        "tensorrt",
        arguments={"guided_decoding_backend": "xgrammar", "enable_lora": True},
        build={"max_beam_width": 3, "lora_config": {"class": "LoraConfig", "max_lora_rank": 16}},
        lora=True,
        max_beam_width=3,
    )
    features = {Feature.JSON, Feature.REGEX, Feature.GRAMMAR, Feature.ADAPTERS, "beam_width"}
    assert features <= probe.client.features
    probe.submit(1, 9, guide=guide, stop_token_ids=list(tokenizer.end_ids))
    probe.submit(2, 3, PROMPT, adapter=Adapter("fables", 2, str(adapter)))
    probe.submit(3, 3, PROMPT, beam_width=3)
    assert await probe.end_of(1, 2, 3, 4, 5) == [FinishReason.STOP] + 4 * [FinishReason.LENGTH]
    assert probe.tokens(1) == guided
    assert probe.tokens(2) == [7, 8, 5]  # the fake's adapter 2 begins two places later
    assert [probe.tokens(beam) for beam in (3, 4, 5)] == [[5, 6, 7], [6, 7, 8], [7, 8, 5]]
    # An adapter that is not there is that request's own error.
    probe.submit(6, 3, adapter=Adapter("none", 3, str(tmp_path / "none")))
    assert await probe.end_of(6) == [FinishReason.ERROR]
    assert "does not exist" in str(probe.of(6)[-1].error)
    # The guide was tried before.
    calls = sorted(machine.calls("generate_async"), key=lambda call: "guided_decoding" not in call["sampling_params"])
    assert calls[0]["sampling_params"]["guided_decoding"] == {
        "class": "GuidedDecodingParams",
        **guide_arguments(guide, "xgrammar"),
    }
    assert calls[1]["lora_request"] == {
        "class": "LoRARequest",
        "lora_name": "fables",
        "lora_int_id": 2,
        "lora_path": str(adapter),
    }
    assert [call["streaming"] for call in calls] == [True, True, False]
    assert (calls[2]["sampling_params"]["n"], calls[2]["sampling_params"]["use_beam_search"]) == (3, True)
    return probe


@pytest.mark.parametrize(("version", "finish"), [("1.2.1", FinishReason.STOP), ("1.3.0", FinishReason.LENGTH)])
@in_processes
async def test_an_engine_that_ignores_stops_with_the_end_token_says_so(
    machine: Machine, version: str, finish: FinishReason
) -> Probe:
    probe = await machine.start(version=version)
    assert probe.client.limits.stops_ignored
    probe.submit(1, 9, PROMPT, ignore_eos=True, stop_token_ids=[PROMPT[1]])
    assert await probe.end_of(1) == [finish]
    return probe


@in_processes
async def test_biases_reach_the_engine_and_a_prompt_is_scored_for_a_client_that_has_left(machine: Machine) -> Probe:
    """Aborted before its first token, a request with log-probabilities of its prompt costs others their responses."""
    probe = await machine.start(version="1.3.0", vocab_size=2048)
    probe.submit(1, 3, PROMPT, logit_bias=((40, 100.0),))
    probe.submit(2, 3, PROMPT, prompt_logprobs=1)
    assert await probe.end_of(1, 2) == 2 * [FinishReason.LENGTH]
    assert (probe.tokens(1), probe.tokens(2)) == ([40] * 3, [5, 6, 7])
    probe.submit(3, 300, PROMPT)
    probe.submit(4, LONG, PROMPT, prompt_logprobs=1)
    probe.client.cancel(4)
    assert await probe.end_of(3, 4) == [FinishReason.LENGTH, FinishReason.CANCELLED]
    return probe


@pytest.mark.parametrize(
    ("backend", "package", "problem"),
    [(backend, "xgrammar", "Regex parsing error at position") for backend in BACKENDS]
    + [("pytorch", "llguidance", "unclosed group")],
)
@in_processes
async def test_a_guide_that_cannot_be_used_never_reaches_the_engine(
    machine: Machine, backend: str, package: str, problem: str, tokenizer: Tokenizer
) -> Probe:
    probe = await machine.start(backend, arguments={"guided_decoding_backend": package})
    bad, good = Guide(GuideKind.REGEX, "("), Guide(GuideKind.REGEX, "a+")
    probe.submit(1, LONG, PROMPT)
    for number, guide in ((2, bad), (3, good), (4, bad)):
        probe.submit(number, 9, guide=guide, stop_token_ids=list(tokenizer.end_ids))
    assert await probe.end_of(2, 3, 4) == [FinishReason.ERROR, FinishReason.STOP, FinishReason.ERROR]
    for number in (2, 4):
        refusal = probe.of(number)[-1].error
        assert isinstance(refusal, Refusal)
        assert refusal.message.startswith(f"the guide cannot be used: {problem}")
    probe.client.cancel(1)
    assert await probe.end_of(1) == [FinishReason.CANCELLED]
    guides = [call["sampling_params"].get("guided_decoding") for call in machine.calls("generate_async")]
    assert [guide and guide["regex"] for guide in guides] == [None, "a+"]
    return probe


# -- code of the checkpoint --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trusted", [False, True])
@in_processes
async def test_code_of_a_checkpoint_is_run_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_stories: Path, trusted: bool
) -> Probe:
    """TensorRT-LLM runs it, whatever its argument says."""
    model = copied(tiny_stories, tmp_path, "config.json", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (model / "configuration_own.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    arguments = {"trust_remote_code": True} if trusted else {}
    probe = await Machine(tmp_path, model, monkeypatch).start(arguments=arguments)
    assert (tmp_path / "was-run").exists() is trusted
    probe.submit(1, 3, PROMPT)
    assert await probe.end_of(1) == [FinishReason.LENGTH]
    return probe


# -- what compiles at its first use ------------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}


@in_processes
async def test_an_engine_is_ready_when_it_has_had_a_request_of_each_kind(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Probe:
    caplog.set_level("INFO")
    arguments = {"guided_decoding_backend": "xgrammar"}
    probe = await machine.start(script={"compiles": 2}, arguments=arguments, logprobs=True, warm_up=True)
    assert (tmp_path / ".cache" / "flashinfer" / "sampling.so").exists()
    assert probe.deltas == []
    asked = [
        set(call["sampling_params"]) - {"class", "detokenize", "max_tokens"} for call in machine.calls("generate_async")
    ]
    sampled = {"temperature", "top_k", "top_p", "seed"}
    assert asked == [set(), sampled, {"logprobs"}, {"logprobs"}, {"guided_decoding"}]
    told = [line for line in caplog.messages if line.startswith("warming up")]
    named = ("greedy", "sampled", "log-probabilities", "likeliest", "guide")
    assert [name for name, line in zip(named, told, strict=True) if name not in line] == []
    probe.submit(0, 3, PROMPT, **SAMPLED)
    assert await probe.end_of(0) == [FinishReason.LENGTH]
    return probe


def test_an_engine_that_cannot_sample_is_not_ready(machine: Machine) -> None:
    async def body() -> None:
        with pytest.raises(ExecutorStartError, match=r"a sampled request \(top_k, top_p\) .* has failed"):
            await machine.start(script={"compiles": "with no compiler"}, warm_up=True)

    run_checked(body)


@pytest.mark.parametrize("backend", BACKENDS)
@in_processes
async def test_a_tokenizer_that_guides_cannot_use_is_served_without_guides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_stories: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> Probe:
    """TensorRT-LLM makes the table of its guides while it loads a model, for whose requests they may never matter."""
    caplog.set_level("INFO")
    monkeypatch.setattr(installation, "MODULES", ("pynvml.py", "xgrammar.py"))  # transformers wants the whole torch
    model = copied(tiny_stories, tmp_path, "tokenizer_config.json", eos_token=None)
    probe = await Machine(tmp_path, model, monkeypatch).start(
        backend, arguments={"guided_decoding_backend": "xgrammar"}, warm_up=True
    )
    assert not probe.client.features & {Feature.JSON, Feature.REGEX, Feature.GRAMMAR}
    assert [line for line in caplog.messages if "guides are off" in line and "no end token" in line]
    return probe


@in_processes
async def test_an_engine_that_compiles_is_silent_for_longer(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> Probe:
    caplog.set_level("INFO")
    probe = await machine.start(script={"compiles": 4}, hang_timeout=1.0)
    probe.submit(1, 3, PROMPT, **SAMPLED)
    assert await probe.end_of(1) == [FinishReason.LENGTH]
    (line,) = [line for line in caplog.messages if "nvcc" in line]
    assert "(option.model_loading_timeout)" in line
    return probe


# -- loss of the engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@in_processes
async def test_a_killed_worker_is_reported_at_once_under_many_streams(machine: Machine, backend: str) -> Probe:
    probe = await machine.start(backend, {"steps_per_second": 50})
    for number in range(64):
        probe.submit(number, LONG, PROMPT)
    await probe.until(lambda: all(probe.tokens(number) for number in range(64)))
    worker = rank(probe)
    worker.kill()
    # TensorRT-LLM's queue then waits for a worker, on the event loop.
    probe.client.cancel(0)
    message = await probe.death()
    assert "a worker process of TensorRT-LLM is gone" in message
    assert str(worker.pid) in message
    return probe


@pytest.mark.parametrize("out_of_memory", [False, True])
@in_processes
async def test_a_worker_that_the_kernel_kills_for_memory_counts_as_a_killed_engine_process(
    machine: Machine, out_of_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> Probe:
    probe = await machine.start(script={"steps_per_second": 50})
    probe.submit(1, LONG, PROMPT)
    await probe.until(lambda: bool(probe.tokens(1)))
    monkeypatch.setattr(client, "oom_kills", lambda: oom_kills() + out_of_memory)
    rank(probe).kill()
    await probe.death()
    assert [death.killed for death in probe.deaths] == [out_of_memory]
    return probe


@pytest.mark.parametrize(("version", "backend"), [("1.2.1", "tensorrt"), ("1.2.1", "pytorch"), ("1.3.0", "pytorch")])
@in_processes
async def test_an_error_of_the_engine_is_reported_in_its_own_words_with_the_next_request(
    machine: Machine, version: str, backend: str
) -> Probe:
    """TensorRT-LLM's worker keeps the error of its other threads until then."""
    fault = {"action": "raise", "at_token": 2, "max_new_tokens": 77}
    probe = await machine.start(backend, {"steps_per_second": 50, "faults": [fault]}, version=version)
    for number in itertools.count():
        if probe.deaths:
            break
        probe.submit(number, 77 if number == 3 else LONG, PROMPT)
        await asyncio.sleep(0.05)
    assert "CppExecutorError: scripted engine failure" in await probe.death()
    # Their answer is the loss, not an error of their own.
    assert [delta for delta in probe.deltas if delta.finish] == []
    return probe


@in_processes
async def test_an_error_of_the_engine_is_found_where_no_request_follows(machine: Machine) -> Probe:
    fault = {"action": "raise", "at_token": 2, "max_new_tokens": 77}
    probe = await machine.start(script={"steps_per_second": 50, "faults": [fault]}, hang_timeout=300.0)
    probe.submit(1, 77, PROMPT)
    assert "CppExecutorError: scripted engine failure" in await probe.death()
    return probe


@in_processes
async def test_an_engine_that_has_lost_responses_is_lost_itself(machine: Machine) -> Probe:
    """TensorRT-LLM gives the error to a request that had nothing to do with it, and does not know its next response."""
    fault = {"action": "lose", "at_token": 2, "max_new_tokens": 77}
    probe = await machine.start(script={"steps_per_second": 50, "faults": [fault]})
    for number in range(3):
        probe.submit(number, 77 if number == 1 else LONG, PROMPT)
    assert "TensorRT-LLM cannot go on: KeyError" in await probe.death()
    return probe


@pytest.mark.parametrize(
    ("backend", "action", "message"),
    [
        ("tensorrt", "cuda", "an illegal memory access was encountered"),
        ("pytorch", "segfault", "a worker process of TensorRT-LLM is gone"),
    ],
)
@in_processes
async def test_an_engine_that_fails_is_reported_at_once(
    machine: Machine, backend: str, action: str, message: str
) -> Probe:
    fault = {"action": action, "at_token": 2, "max_new_tokens": 77}
    probe = await machine.start(backend, {"steps_per_second": 50, "faults": [fault]})
    for number in range(8):
        probe.submit(number, 77 if number == 3 else LONG, PROMPT)
    assert message in await probe.death()
    # Their answer is the loss, not an error of their own.
    assert [delta for delta in probe.deltas if delta.finish] == []
    return probe


@in_processes
async def test_an_engine_whose_loop_has_ended_is_reported_also_where_every_client_gives_up(machine: Machine) -> Probe:
    """PyExecutor's loop ends with an iteration that fails; its process goes on, takes requests and answers none."""
    fault = {"action": "forward", "at_token": 2, "max_new_tokens": 77, "message": "a shape does not fit"}
    probe = await machine.start(script={"steps_per_second": 50, "faults": [fault]}, hang_timeout=4.0)
    probe.submit(1, 77, PROMPT)
    probe.submit(2, LONG, PROMPT)
    for number in (1, 2):
        assert await probe.end_of(number) == [FinishReason.ERROR]
        assert probe.of(number)[-1].error == "a shape does not fit"
    probe.submit(3, LONG, PROMPT)
    await asyncio.sleep(0.2)
    probe.client.cancel(3)
    assert await probe.end_of(3) == [FinishReason.CANCELLED]
    assert "TensorRT-LLM has been silent for 4 seconds with 1 requests in it" in await probe.death()
    return probe


@in_processes
async def test_a_shutdown_that_the_worker_does_not_follow_is_bounded(machine: Machine) -> Probe:
    probe = await machine.start()
    os.kill(rank(probe).pid, signal.SIGSTOP)
    host = psutil.Process(probe.client.pid)
    await probe.client.close(timeout=200)
    assert not host.is_running()
    return probe


# -- loading -----------------------------------------------------------------------------------------------------------


@by_table("backend", "error", "message", apart=True)
def test_a_load_that_fails_is_reported_with_its_cause(machine: Machine, backend: str, error: str, message: str) -> None:
    async def body() -> None:
        with pytest.raises(ExecutorStartError, match=message):
            await machine.start(backend, {"load_error": error})

    run_checked(body)


def test_a_load_that_hangs_is_ended_with_its_workers(machine: Machine) -> None:
    async def body() -> None:
        with pytest.raises(ExecutorStartError, match=r"not loaded within 4 seconds"):
            await machine.start(script={"load_error": "hang"}, timeout=4.0)

    run_checked(body)
    assert not [process for process in psutil.process_iter() if str(machine._directory) in _command(process)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join([*process.cmdline(), process.environ().get("FAKE_TENSORRT_LLM_LOG", "")])
    except psutil.Error:
        return ""
