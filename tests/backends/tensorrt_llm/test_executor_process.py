"""Requests to TensorRT-LLM in real host processes; TensorRT-LLM is the fake."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from djl_trtllm.backends.tensorrt_llm.sampler import find_sampler
from djl_trtllm.backends.tensorrt_llm.sampling import guide_arguments, sampling_arguments
from djl_trtllm.executor.protocol import Feature, Refusal, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, FinishReason, Guide, GuideKind, Sampling
from tests.backends.tensorrt_llm.machine import BACKENDS, LONG, PROMPT, Machine, run
from tests.executor.probe import Probe
from tests.support.adapters import write_adapter

pytestmark = pytest.mark.slow

# -- what is asked of TensorRT-LLM -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_reaches_tensorrt_llm_as_it_was_translated(machine: Machine, backend: str) -> None:
    whole = Submit(
        1,
        list(PROMPT),
        Sampling(
            4, min_new_tokens=2, do_sample=True, temperature=0.7, top_k=9, top_p=0.8, seed=11, ignore_eos=True,
            repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, min_p=0.05, no_repeat_ngram_size=3,
        ),
        stop_token_ids=[90, 91],
        stop=["wolf"],
        bad=["grandmother"],
    )  # fmt: skip

    async def body() -> Probe:
        arguments = {"sampler_type": "TRTLLMSampler"} if backend == "pytorch" else {}
        probe = await machine.start(backend, arguments=arguments)
        probe.client.submit(whole)
        assert await probe.end_of(1) == [FinishReason.LENGTH]
        return probe

    run(body)
    (call,) = machine.calls("generate_async")
    assert call == {
        "inputs": list(PROMPT),
        "sampling_params": {"class": "SamplingParams", **sampling_arguments(whole)},
        "lora_request": None,
        "streaming": True,
    }


def test_guides_adapters_and_beams_reach_the_engine(machine: Machine, tmp_path: Path, tokenizer: Tokenizer) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    guide = Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}')
    guided = [*tokenizer.encode("{}", False), *tokenizer.end_ids]

    async def body() -> Probe:
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
        return probe

    run(body)
    # The guide was tried before.
    calls = sorted(machine.calls("generate_async"), key=lambda call: "guided_decoding" not in call["sampling_params"])
    assert calls[0]["sampling_params"]["guided_decoding"] == {"class": "GuidedDecodingParams", **guide_arguments(guide)}
    assert calls[1]["lora_request"] == {
        "class": "LoRARequest",
        "lora_name": "fables",
        "lora_int_id": 2,
        "lora_path": str(adapter),
    }
    assert [call["streaming"] for call in calls] == [True, True, False]
    assert (calls[2]["sampling_params"]["n"], calls[2]["sampling_params"]["use_beam_search"]) == (3, True)


@pytest.mark.parametrize(
    ("backend", "package", "problem"),
    [(backend, "xgrammar", "Regex parsing error at position") for backend in BACKENDS]
    + [("pytorch", "llguidance", "unclosed group")],
)
def test_a_guide_that_cannot_be_used_never_reaches_the_engine(
    machine: Machine, backend: str, package: str, problem: str, tokenizer: Tokenizer
) -> None:
    async def body() -> Probe:
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
        return probe

    run(body)
    guides = [call["sampling_params"].get("guided_decoding") for call in machine.calls("generate_async")]
    assert [guide and guide["regex"] for guide in guides] == [None, "a+"]


# -- what comes back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_token_that_ended_a_sequence_is_its_last(machine: Machine, backend: str, tokenizer: Tokenizer) -> None:
    (end_id,) = tokenizer.end_ids
    wolf = tokenizer.encode(" wolf", False)

    async def body() -> Probe:
        probe = await machine.start(backend)
        probe.submit(1, 3, PROMPT)
        probe.submit(2, 99, (5, 6, end_id), stop_token_ids=[end_id])
        probe.submit(3, 99, PROMPT, stop_token_ids=[end_id, 7])
        probe.submit(4, 99, (5, *wolf, 9), stop=[tokenizer.decode(wolf, False)])
        probe.submit(5, 4, (5, end_id), ignore_eos=True)
        assert await probe.end_of(1, 2, 3, 4, 5) == [FinishReason.LENGTH, *3 * [FinishReason.STOP], FinishReason.LENGTH]
        assert [probe.tokens(number) for number in range(1, 6)] == [
            [5, 6, 7],
            [5, 6, end_id],
            [5, 6, 7],
            [5, *wolf],
            [5, end_id, 5, end_id],
        ]
        return probe

    run(body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_come_with_each_token(machine: Machine, backend: str) -> None:
    async def body() -> Probe:
        arguments = {"gather_generation_logits": True} if backend == "tensorrt" else {}
        probe = await machine.start(backend, arguments=arguments, logprobs=True)
        assert Feature.LOGPROBS in probe.client.features
        probe.submit(1, 6, PROMPT, logprobs=True)
        probe.submit(2, 6, PROMPT)
        await probe.end_of(1, 2)
        assert [value for delta in probe.of(1) for value in delta.logprobs or ()] == [-0.5] * 6
        assert all(delta.logprobs is None for delta in probe.of(2))
        return probe

    run(body)


def test_reused_prompt_tokens_are_reported_once(machine: Machine) -> None:
    prompt = tuple(range(10, 110))

    async def body() -> Probe:
        probe = await machine.start(arguments={"kv_cache_config": {"class": "KvCacheConfig", "tokens_per_block": 32}})
        for number in (1, 2):
            probe.submit(number, 5, prompt)
            await probe.end_of(number)
        assert [sum(delta.cached_tokens for delta in probe.of(number)) for number in (1, 2)] == [0, 96]
        return probe

    run(body)


def test_many_requests_at_once_come_in_few_messages(machine: Machine) -> None:
    async def body() -> Probe:
        probe = await machine.start(script={"steps_per_second": 50})
        for number in range(64):
            probe.submit(number, 25, PROMPT)
        assert await probe.end_of(*range(64)) == [FinishReason.LENGTH] * 64
        assert all(probe.tokens(number) == [*PROMPT * 6, 5] for number in range(64))
        # Sixty-four times as many, if each token came alone.
        assert len(probe.stats) < 64 * 25 / 4
        return probe

    run(body)


def test_limits_features_and_iteration_statistics_are_reported(machine: Machine) -> None:
    async def body() -> Probe:
        probe = await machine.start(
            script={"steps_per_second": 20}, arguments={"max_batch_size": 2}, max_sequences=2, lookahead=3
        )
        limits = probe.client.limits
        assert (limits.max_sequences, limits.lookahead, limits.kv_blocks) == (2, 3, 0)
        assert probe.client.features == find_sampler("1.2.1", "pytorch", {}, 1).fields
        assert probe.client.details["TensorRT-LLM"] == "1.2.1"
        assert probe.client.details["GPUs"] == 1
        for number in range(4):
            probe.submit(number, LONG, PROMPT)
        await probe.until(lambda: bool(probe.stats) and probe.stats[-1].queued == 2)
        stats = probe.stats[-1]
        assert stats.running == 2
        assert stats.kv_blocks_used
        assert stats.kv_blocks
        assert stats.kv_blocks_used < stats.kv_blocks
        assert stats.kv_usage == stats.kv_blocks_used / stats.kv_blocks
        assert (stats.iterations or 0) > 1
        assert (stats.iteration_seconds or 0) > 0.01
        return probe

    run(body)


def test_signals_to_the_process_group_are_the_servers_business(machine: Machine) -> None:
    async def body() -> Probe:
        probe = await machine.start(script={"steps_per_second": 50})
        probe.submit(1, 40, PROMPT)
        await probe.until(lambda: bool(probe.tokens(1)))
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(probe.client.pid, number)
        assert await probe.end_of(1) == [FinishReason.LENGTH]
        return probe

    run(body)


# -- errors of one request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_one_of_many_is_its_own(machine: Machine, backend: str) -> None:
    async def body() -> Probe:
        fault = {"action": "error", "at_token": 3, "max_new_tokens": 77, "message": "no room for it"}
        probe = await machine.start(backend, {"faults": [fault]})
        for number in range(32):
            probe.submit(number, 77 if number == 11 else 20, PROMPT)
        ends = await probe.end_of(*range(32))
        assert ends == [FinishReason.ERROR if number == 11 else FinishReason.LENGTH for number in range(32)]
        assert probe.of(11)[-1].error == "no room for it"
        assert probe.tokens(11) == [5, 6, 7]
        return probe

    run(body)


@pytest.mark.parametrize(
    ("version", "backend", "message"),
    [("1.2.1", "tensorrt", "should not exceed max_seq_len"), ("1.3.0", "pytorch", "should not exceed max_num_tokens")],
)
def test_what_is_refused_at_once_is_an_error_of_the_request(
    machine: Machine, version: str, backend: str, message: str
) -> None:
    async def body() -> Probe:
        arguments = {"max_num_tokens": 16} if backend == "pytorch" else {}
        probe = await machine.start(backend, version=version, arguments=arguments, build={"max_seq_len": 16})
        probe.submit(1, 5, tuple(range(5, 35)))
        probe.submit(2, 5, ())
        probe.submit(3, 5)
        assert await probe.end_of(1, 2, 3) == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]
        assert message in str(probe.of(1)[-1].error)
        return probe

    run(body)


# -- cancelling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_is_cancelled_wherever_it_is(machine: Machine, backend: str) -> None:
    async def body() -> Probe:
        size = {"max_batch_size": 1}
        probe = await machine.start(
            backend,
            {"steps_per_second": 100, "prefill_seconds": 1.0},
            arguments=size if backend == "pytorch" else {},
            build=size,
            lookahead=2,
        )

        async def heard(number: int, tokens: int) -> None:
            await probe.until(lambda: len(probe.tokens(number)) >= tokens)

        async def cancelled(number: int) -> None:
            probe.client.cancel(number)
            probe.client.cancel(number)
            assert await probe.end_of(number) == [FinishReason.CANCELLED]
            probe.client.cancel(number)

        # In the engine's queue, behind one that goes on.
        probe.submit(1, LONG, PROMPT)
        await probe.until(lambda: bool(probe.tokens(1)))
        probe.submit(2, LONG, PROMPT)
        await cancelled(2)
        assert probe.tokens(2) == []
        generated = len(probe.tokens(1))
        await probe.until(lambda: len(probe.tokens(1)) > generated + 5)
        # In the middle.
        await cancelled(1)
        # While its prompt is computed.
        probe.submit(3, LONG, PROMPT)
        await asyncio.sleep(0.1)
        await cancelled(3)
        assert probe.tokens(3) == []
        # On the first token, and on the last but one.
        for number, tokens, seen in ((4, LONG, 1), (5, 20, 19)):
            probe.submit(number, tokens, PROMPT)
            await heard(number, seen)
            probe.client.cancel(number)
            (end,) = await probe.end_of(number)
            assert end in (
                (FinishReason.CANCELLED,) if tokens == LONG else (FinishReason.CANCELLED, FinishReason.LENGTH)
            )
        # After the end, and what never was.
        probe.submit(6, 2, PROMPT)
        await probe.end_of(6)
        probe.client.cancel(6)
        probe.client.cancel(77)
        # The only place is free.
        probe.submit(7, 4, PROMPT)
        assert await probe.end_of(7) == [FinishReason.LENGTH]
        assert probe.tokens(7) == list(PROMPT)
        assert probe.deaths == []
        return probe

    run(body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_place_is_given_back_with_the_late_end_and_nothing_before(machine: Machine, backend: str) -> None:
    async def body() -> Probe:
        probe = await machine.start(backend, {"steps_per_second": 50, "cancel_latency": 50})
        probe.submit(1, LONG, PROMPT)
        await probe.until(lambda: len(probe.tokens(1)) >= 3)
        probe.client.cancel(1)
        assert await probe.end_of(1) == [FinishReason.CANCELLED]
        assert probe.stats[-1].running == 0
        return probe

    run(body)


def test_log_probabilities_on_the_engine_backend_are_drained_unaborted(machine: Machine) -> None:
    async def body() -> Probe:
        # The fake's engine dies of that abort, as the real one does.
        probe = await machine.start(
            "tensorrt", {"steps_per_second": 50}, arguments={"gather_generation_logits": True}, logprobs=True
        )
        probe.submit(1, 200, PROMPT, logprobs=True)
        await probe.until(lambda: bool(probe.tokens(1)))
        probe.client.cancel(1)
        assert await probe.end_of(1) == [FinishReason.CANCELLED]
        assert len(probe.tokens(1)) < 200
        probe.submit(2, 3, PROMPT)
        assert await probe.end_of(2) == [FinishReason.LENGTH]
        return probe

    run(body)


def test_an_abort_that_the_engine_never_follows_is_its_loss(machine: Machine) -> None:
    async def body() -> Probe:
        probe = await machine.start(script={"steps_per_second": 50, "cancel_latency": 10**9}, hang_timeout=1.0)
        probe.submit(1, LONG, PROMPT)
        await probe.until(lambda: bool(probe.tokens(1)))
        probe.client.cancel(1)
        assert "did not end a request within 1 seconds after it was aborted" in await probe.death()
        return probe

    run(body)
