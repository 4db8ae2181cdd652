"""TensorRT-LLM's executor over an LLM that is played, in this process and in virtual time."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from djl_trtllm.backends.tensorrt_llm.executor import EngineLostError
from djl_trtllm.backends.tensorrt_llm.sampler import find_sampler
from djl_trtllm.executor.protocol import Delta, Feature, Stats
from djl_trtllm.request import Adapter, FinishReason, Guide, GuideKind
from tests.backends.tensorrt_llm.played_llm import MakeEngine, RequestError
from tests.support.virtual_time import in_virtual_time

# -- what there is -----------------------------------------------------------------------------------------------------


def test_a_plain_executor_has_its_limits_and_the_fields_of_its_sampler(make: MakeEngine) -> None:
    engine = make(arguments={"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, lookahead=3)
    limits = engine.executor.limits
    assert (limits.max_sequences, limits.kv_blocks, limits.block_size) == (8, 0, 32)
    assert (limits.max_seq_len, limits.lookahead) == (100, 3)
    assert engine.executor.features == find_sampler("1.2.1", "pytorch", {}, 1).fields
    assert engine.executor.details == {
        "TensorRT-LLM": "1.2.1",
        "backend": "pytorch",
        "GPUs": 8,
        "worker processes": 0,
    }
    arguments = {"model": "model", "tokenizer": "tokenizer", "tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    assert engine.llm.arguments == arguments


def test_whether_the_engine_is_given_stops_is_one_of_its_limits(make: MakeEngine) -> None:
    assert make().executor.limits.stops is True
    assert make(stop_in_engine=False).executor.limits.stops is False


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({"logprobs": True}, {Feature.LOGPROBS, "top_logprobs"}),
        ({"arguments": {"guided_decoding_backend": "xgrammar"}}, {Feature.JSON, Feature.REGEX, Feature.GRAMMAR}),
        ({"lora": True}, {Feature.ADAPTERS}),
        ({"max_beam_width": 2}, set()),
        ({"backend": "tensorrt"}, set()),
    ],
)
def test_features_are_those_that_were_asked_for(
    make: MakeEngine, options: dict[str, object], features: set[str]
) -> None:
    backend, beams = str(options.get("backend", "pytorch")), 2 if "max_beam_width" in options else 1
    fields = find_sampler("1.2.1", backend, {}, beams).fields
    assert make(**options).executor.features == fields | features


def test_beams_are_as_many_as_the_pytorch_backend_was_loaded_for(make: MakeEngine) -> None:
    beams = {"max_beam_width": 3, "logprobs": True}
    by_torch = make(**beams, arguments={"max_beam_width": 3}).executor
    assert (by_torch.limits.beams, by_torch.limits.seeded) == (3, True)
    assert Feature.BEAM_LOGPROBS in by_torch.features
    by_engine = make(**beams, backend="tensorrt").executor
    assert (by_engine.limits.beams, by_engine.limits.seeded) == (0, True)
    assert (by_torch.limits.most_beams, by_engine.limits.most_beams) == (0, 3)
    assert Feature.BEAM_LOGPROBS not in by_engine.features
    assert Feature.BEAM_LOGPROBS not in make(max_beam_width=3, arguments={"max_beam_width": 3}).executor.features


@pytest.mark.parametrize("accepted", [False, True])
def test_seeds_that_are_ignored_are_refused_unless_the_option_accepts_them(make: MakeEngine, accepted: bool) -> None:
    executor = make(accept_ignored_seeds=accepted).executor
    assert (executor.limits.seeded, "seed" in executor.features) == (False, accepted)


@in_virtual_time
async def test_log_probabilities_of_beams_are_asked_for_as_the_sampler_wants(make: MakeEngine) -> None:
    for version, asked in (("1.2.1", 1), ("1.3.0", 0)):
        engine = make(version, max_beam_width=2, arguments={"max_beam_width": 2}, logprobs=True)
        await engine.begin()
        engine.submit(1, beam_width=2, logprobs=True)
        assert engine.llm.calls[-1]["sampling_params"].logprobs == asked
        await engine.ended()


def test_the_environment_is_there_before_the_engine(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_PLAYED", "before")
    make(environment={"TLLM_PLAYED": "after"})
    assert os.environ["TLLM_PLAYED"] == "after"


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_request_is_handed_over_and_its_tokens_come_back(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make()
        await engine.begin()
        result = engine.submit(1)
        call = engine.llm.calls[0]
        assert (call["inputs"], call["lora_request"], call["streaming"]) == ([5, 6], None, True)
        assert vars(call["sampling_params"]) == {"max_tokens": 9, "detokenize": False}
        result.say(7)
        await asyncio.sleep(0.1)
        assert engine.executor.stats() == Stats(running=1)
        result.say(8, end="length")
        await asyncio.sleep(0.1)
        assert engine.deltas == [Delta(1, [7]), Delta(1, [8], None, FinishReason.LENGTH)]
        assert engine.executor.stats() == Stats()
        await engine.ended()

    body()


def test_guides_adapters_and_beams_are_handed_over(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make("1.2.1", backend="tensorrt")
        await engine.begin()
        engine.submit(1, guide=Guide(GuideKind.REGEX, "a+"), adapter=Adapter("french", 3, "adapters/french"))
        engine.submit(2, beam_width=2)
        first, second = engine.llm.calls
        assert vars(first["sampling_params"].guided_decoding) == {"regex": "a+"}
        assert vars(first["lora_request"]) == {"name": "french", "number": 3, "path": "adapters/french"}
        assert (first["streaming"], second["streaming"]) == (True, False)
        await engine.ended()

    body()


@pytest.mark.parametrize("error", [ValueError("bad"), TypeError("bad"), IndexError("bad"), RequestError("bad")])
def test_what_is_refused_is_the_requests_own_error(make: MakeEngine, error: Exception) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make()
        await engine.begin()
        engine.llm.refusal = error
        engine.submit(1)
        await asyncio.sleep(0.1)
        assert engine.deltas == [Delta(1, [], None, FinishReason.ERROR, "bad")]
        assert not engine.running.done()
        await engine.ended()

    body()


@pytest.mark.parametrize("where", ["submit", "response", "abort"])
def test_any_other_error_is_the_loss_of_the_engine(make: MakeEngine, where: str) -> None:
    @in_virtual_time
    async def body() -> None:
        engine, error = make(), ConnectionError("queue closed")
        await engine.begin()
        engine.llm.refusal = error if where == "submit" else None
        result = engine.submit(1)
        if where == "response":
            result.fail(error)
        elif where == "abort":
            result.abort_error = error
            engine.executor.cancel(1)
        with pytest.raises(ConnectionError, match="queue closed"):
            await engine.running
        assert engine.deltas == []
        await engine.ended()

    body()


@pytest.mark.parametrize("error", [RequestError("no room for it"), ValueError("too few log-probabilities")])
def test_an_error_of_a_response_ends_its_request_alone(make: MakeEngine, error: Exception) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make()
        await engine.begin()
        first, second = engine.submit(1), engine.submit(2)
        first.fail(error)
        second.say(7, end="length")
        await asyncio.sleep(0.1)
        assert engine.deltas == [
            Delta(1, [], None, FinishReason.ERROR, str(error)),
            Delta(2, [7], None, FinishReason.LENGTH),
        ]
        # The engine does not know of an error that was found here.
        assert first.aborts == isinstance(error, ValueError)
        await engine.ended()

    body()


@pytest.mark.parametrize("error", [KeyError(5), AttributeError("outputs"), NotImplementedError("a new response")])
def test_a_result_that_cannot_be_read_ends_its_request_alone(make: MakeEngine, error: Exception) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make()
        await engine.begin()
        first, second = engine.submit(1), engine.submit(2)
        first.fail(error)
        second.say(7, end="length")
        await asyncio.sleep(0.1)
        told = f"TensorRT-LLM's result cannot be read ({type(error).__name__}: {error})"
        assert [(delta.request_id, delta.finish, delta.error) for delta in engine.deltas] == [
            (1, FinishReason.ERROR, told),
            (2, FinishReason.LENGTH, None),
        ]
        assert first.aborts == 1
        await engine.ended()

    body()


@pytest.mark.parametrize("words", ["CUDA error: an illegal memory access", "NCCL error", "device-side assert"])
def test_an_error_of_a_request_after_which_none_succeeds_is_the_loss_of_the_engine(
    make: MakeEngine, words: str
) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make()
        await engine.begin()
        engine.submit(1).fail(RequestError(words))
        with pytest.raises(EngineLostError, match=f"TensorRT-LLM cannot go on: {words}"):
            await engine.running
        assert not any(delta.finish for delta in engine.deltas)
        await engine.ended()

    body()


@pytest.mark.parametrize(
    ("lost", "options"),
    [
        (True, {}),
        (True, {"arguments": {"disable_overlap_scheduler": True, "guided_decoding_backend": "xgrammar"}}),
        (False, {"arguments": {"disable_overlap_scheduler": True}}),
        (False, {"backend": "tensorrt", "arguments": {"guided_decoding_backend": "xgrammar"}}),
    ],
)
def test_an_iteration_without_memory_is_the_loss_of_an_engine_whose_loop_ends_with_it(
    make: MakeEngine, lost: bool, options: dict[str, Any]
) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(**options)
        await engine.begin()
        engine.submit(1).fail(RequestError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        await asyncio.sleep(0.1)
        assert [delta.finish for delta in engine.deltas] == ([] if lost else [FinishReason.ERROR])
        if lost:
            with pytest.raises(EngineLostError, match="TensorRT-LLM cannot go on: CUDA out of memory"):
                await engine.running
        await engine.ended()

    body()


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_is_aborted_once_and_ends_with_the_engines_last_response(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make()
        await engine.begin()
        result = engine.submit(1)
        result.say(7)
        await asyncio.sleep(0.1)
        for request_id in (1, 1, 99):
            engine.executor.cancel(request_id)
        assert result.aborts == 1
        result.say(8)
        await asyncio.sleep(3)
        assert engine.executor.stats().running == 1  # its place is not free yet
        result.say(end="cancelled")
        await asyncio.sleep(0.1)
        assert engine.deltas == [Delta(1, [7]), Delta(1, [], None, FinishReason.CANCELLED)]
        assert engine.executor.stats().running == 0
        await engine.ended()

    body()


@pytest.mark.parametrize("error", [AttributeError("no cum_log_probs"), RequestError("no room"), ValueError("wrong")])
def test_a_cancelled_request_whose_result_raises_has_been_cancelled(
    make: MakeEngine, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's last response of a request that was aborted before its first token has no `cum_log_probs`."""

    @in_virtual_time
    async def body() -> None:
        engine = make()
        await engine.begin()
        result = engine.submit(1)
        engine.executor.cancel(1)
        result.fail(error)
        await asyncio.sleep(0.1)
        assert engine.deltas == [Delta(1, [], None, FinishReason.CANCELLED)]
        assert result.aborts == 1
        assert engine.executor.stats().running == 0
        await engine.ended()

    body()
    assert "Traceback" not in capsys.readouterr().err


def test_a_request_that_the_engine_drops_without_a_word_is_ended_after_a_second(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make()
        await engine.begin()
        engine.submit(1)
        engine.executor.cancel(1)
        await asyncio.sleep(0.95)
        assert engine.executor.stats().running == 1
        await asyncio.sleep(0.6)
        assert engine.deltas == [Delta(1, [], None, FinishReason.CANCELLED)]
        assert engine.executor.stats().running == 0
        await engine.ended()

    body()


@pytest.mark.parametrize(("backend", "logprobs", "aborted"), [("tensorrt", True, 0), ("pytorch", True, 1)])
def test_log_probabilities_on_the_engine_backend_are_drained_unaborted(
    make: MakeEngine, backend: str, logprobs: bool, aborted: int
) -> None:
    """TensorRT-LLM #10810."""

    @in_virtual_time
    async def body() -> None:
        engine = make(backend=backend, logprobs=True)
        await engine.begin()
        result = engine.submit(1, logprobs=logprobs)
        engine.executor.cancel(1)
        assert result.aborts == aborted
        result.say(7)
        result.say(8, end="length")
        await asyncio.sleep(0.1)
        assert engine.deltas == [Delta(1, [], None, FinishReason.CANCELLED)]
        await engine.ended()

    body()


def test_an_abort_that_the_engine_never_follows_is_its_loss(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=8.0)
        await engine.begin()
        result = engine.submit(1)
        result.say(7)
        await asyncio.sleep(0.1)
        engine.executor.cancel(1)
        for _ in range(7):
            await asyncio.sleep(1)
            result.say(8)  # it is not silent
        assert not engine.running.done()
        await asyncio.sleep(2)
        with pytest.raises(EngineLostError, match="did not end a request within 8 seconds after it was aborted"):
            await engine.running
        await engine.ended()

    body()
