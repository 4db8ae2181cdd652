"""TensorRT-LLM's executor over an LLM that is played, in this process and in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.backends.tensorrt_llm import executor as module
from djl_trtllm.backends.tensorrt_llm.executor import EngineLostError
from djl_trtllm.backends.tensorrt_llm.sampling import find_sampler
from djl_trtllm.executor.protocol import Feature, Limits, Refusal, Stats, Submit
from djl_trtllm.request import Adapter, FinishReason, Guide, GuideKind, Sampling
from tests.backends.tensorrt_llm.kit import MakeEngine, RequestError, played
from tests.support.steps import Delta
from tests.support.tables import by_table

PLAIN_LOOP = {"disable_overlap_scheduler": True}

# -- what there is -----------------------------------------------------------------------------------------------------


def test_a_plain_executor_has_its_limits_and_the_fields_of_its_sampler(make: MakeEngine) -> None:
    engine = make(arguments={"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, lookahead=3)
    assert engine.executor.limits == Limits(8, 0, 32, 100, lookahead=3, seeded=False, stops_ignored=True)
    assert make(max_prompt_len=60).executor.limits.max_prompt_len == 60
    assert make(stop_in_engine=False).executor.limits.stops is False
    fields = find_sampler("1.2.1", "pytorch", {}, 1).fields
    assert engine.executor.features == fields - {"logit_bias"} | {"cache_salt"}
    assert "logit_bias" in make(vocab_size=100).executor.features
    shown = {"TensorRT-LLM": "1.2.1", "backend": "pytorch", "GPUs": 8, "worker processes": 0}
    assert engine.executor.details == shown
    arguments = {"model": "model", "tokenizer": "tokenizer", "tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    assert engine.llm.arguments == arguments


GUIDES = {Feature.JSON, Feature.REGEX, Feature.GRAMMAR}


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({"logprobs": True}, {Feature.LOGPROBS, "top_logprobs"}),
        ({"arguments": {"guided_decoding_backend": "xgrammar"}}, {*GUIDES, Feature.STRUCTURAL_TAG}),
        ({"arguments": {"guided_decoding_backend": "xgrammar"}, "backend": "tensorrt"}, GUIDES),
        ({"arguments": {"guided_decoding_backend": "llguidance"}}, GUIDES),
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
    assert make(vocab_size=9, **options).executor.features == fields | features | {"cache_salt"}


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


@pytest.mark.parametrize(
    ("feature", "before", "since"),
    [("prompt_logprobs", "1.3.0rc10", "1.3.0rc11"), (Feature.STRUCTURAL_TAG, "1.1.0", "1.2.0")],
)
def test_features_of_the_pytorch_backend_are_there_from_a_version_on(
    make: MakeEngine, feature: str, before: str, since: str
) -> None:
    guided = {"guided_decoding_backend": "xgrammar"}
    loaded = [(before, "pytorch"), (since, "pytorch"), (since, "tensorrt")]
    features = [make(version, backend=backend, arguments=guided).executor.features for version, backend in loaded]
    assert [feature in each for each in features] == [False, True, False]


BEAMS = Sampling(3, beam_width=4)
SCORED = frozenset({Feature.LOGPROBS, Feature.BEAM_LOGPROBS, "top_logprobs"})


@pytest.mark.parametrize(
    ("features", "requests"),
    [
        (GUIDES | {Feature.LOGPROBS}, [(BEAMS, {}, set())]),
        (SCORED | {"seed"}, [(BEAMS, {}, set()), (BEAMS, {"logprobs": True}, SCORED)]),
    ],
)
def test_an_engine_whose_requests_all_have_beams_first_gets_such_a_request_of_each_kind(
    features: frozenset[str], requests: list[tuple[Sampling, dict[str, Any], set[str]]]
) -> None:
    found = module.first_requests_of(Limits(8, 0, 32, 100, beams=4), features, 7)
    expected = [(Submit(0, [7] * 8, sampling, **fields), frozenset(own)) for sampling, fields, own in requests]
    assert [(each.request, each.features) for each in found] == expected


@pytest.mark.parametrize(
    ("max_seq_len", "max_prompt_len", "prompt", "tokens"),
    [(100, 0, 8, 3), (100, 5, 5, 3), (12, 0, 6, 3), (5, 0, 2, 3), (4, 0, 2, 2), (1, 0, 1, 1)],
)
def test_the_first_requests_fit_an_engine_with_short_sequences(
    max_seq_len: int, max_prompt_len: int, prompt: int, tokens: int
) -> None:
    for each in module.first_requests_of(Limits(8, 0, 32, max_seq_len, max_prompt_len=max_prompt_len), SCORED):
        assert (each.request.prompt_ids, each.request.sampling.max_new_tokens) == ([1] * prompt, tokens)


def transformers(monkeypatch: pytest.MonkeyPatch, tokenizer: dict[str, Any] | None) -> list[Any]:
    """Play transformers with a tokenizer that differs from a usual one, or fails to load. Returns what it was asked."""
    usual = {"eos_token_id": 0, "is_fast": True, "vocab_files_names": {"vocab_file": "tokenizer.model"}}
    asked: list[Any] = []

    def from_pretrained(*asking: object, **keywords: object) -> SimpleNamespace:
        asked.append((*asking, keywords))
        if tokenizer is None:
            raise OSError
        return SimpleNamespace(**usual | tokenizer)

    made = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", made)
    return asked


@pytest.mark.parametrize(
    ("package", "tokenizer", "problem"),
    [
        ("xgrammar", {}, ""),
        ("xgrammar", {"eos_token_id": None}, "no end token"),
        ("xgrammar", {"is_fast": False}, "in Python"),
        ("xgrammar", {"is_fast": False, "vocab_files_names": {"vocab_file": "a.tiktoken"}}, ""),
        ("llguidance", {"is_fast": False, "vocab_files_names": {"vocab_file": "a.tiktoken"}}, "in Python"),
        ("xgrammar", {"is_fast": False, "vocab_files_names": {}}, "in Python"),
        ("xgrammar", None, ""),  # the load finds out and says more
    ],
)
def test_a_tokenizer_that_guides_cannot_use_is_found_before_the_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, tokenizer: dict[str, Any] | None, problem: str
) -> None:
    asked = transformers(monkeypatch, tokenizer)
    found = module.guide_problem(package, str(tmp_path), trust_remote_code=True)
    assert (found is None) == (not problem) and problem in (found or "")
    assert asked == [(str(tmp_path), {"trust_remote_code": True, "local_files_only": True})]


@pytest.mark.parametrize(
    ("config", "whole", "read"),
    [
        ({"eos_token": "</s>"}, True, False),
        ({"eos_token": "</s>"}, False, True),
        ({"eos_token": "</s>", "auto_map": {}}, True, True),
        ({"eos_token": None}, True, True),
        ([], True, True),
        (None, True, True),
    ],
)
def test_files_of_an_ordinary_tokenizer_are_enough_to_know_that_guides_can_use_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: object, whole: bool, read: bool
) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if whole:
        (tmp_path / "tokenizer.json").touch()
    asked = transformers(monkeypatch, None)
    assert module.guide_problem("xgrammar", str(tmp_path), trust_remote_code=False) is None
    assert len(asked) == read


def test_an_executor_without_a_usable_tokenizer_has_no_guides_and_says_why(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "guide_problem", lambda *_, **__: "the reason")
    engine = make(arguments={"guided_decoding_backend": "xgrammar", "tensor_parallel_size": 2})
    assert not engine.executor.features & GUIDES
    assert engine.llm.arguments == {"model": "model", "tokenizer": "tokenizer", "tensor_parallel_size": 2}
    assert "the reason" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "kv_cache", "apart", "salts"),
    [
        ("1.0.0", {}, False, [None, None]),
        ("1.0.0", {"enable_block_reuse": True}, False, [None, None]),
        ("1.0.0", {"enable_block_reuse": False}, True, [None, None]),
        ("1.1.0", {"enable_block_reuse": True}, True, ["key", None]),
    ],
)
@played
async def test_prompts_of_different_keys_are_kept_apart_by_salts_or_because_none_is_reused(
    make: MakeEngine, version: str, kv_cache: dict[str, bool], apart: bool, salts: list[str | None]
) -> None:
    engine = await make.begun(version, arguments={"kv_cache_config": kv_cache})
    assert ("cache_salt" in engine.executor.features) == apart
    for number, salt in enumerate(("key", "")):
        engine.submit(number, cache_salt=salt)
    assert [call.get("cache_salt") for call in engine.llm.calls] == salts


@pytest.mark.parametrize("accepted", [False, True])
def test_seeds_that_are_ignored_are_refused_unless_the_option_accepts_them(make: MakeEngine, accepted: bool) -> None:
    executor = make(accept_ignored_seeds=accepted).executor
    assert (executor.limits.seeded, "seed" in executor.features) == (False, accepted)


# -- requests ----------------------------------------------------------------------------------------------------------


@played
async def test_a_request_is_handed_over_and_its_tokens_come_back(make: MakeEngine) -> None:
    engine = await make.begun()
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


@played
async def test_a_speculating_engine_is_asked_for_what_drafts_proposed(make: MakeEngine) -> None:
    engine = await make.begun(arguments={"speculative_config": {"decoding_type": "NGram"}})
    engine.submit(1)
    assert engine.llm.calls[0]["sampling_params"].return_perf_metrics is True
    assert engine.executor.limits.draft_tokens == 1


@played
async def test_guides_adapters_and_beams_are_handed_over(make: MakeEngine) -> None:
    engine = await make.begun("1.2.1", backend="tensorrt")
    engine.submit(1, guide=Guide(GuideKind.REGEX, "a+"), adapter=Adapter("french", 3, "adapters/french"))
    engine.submit(2, beam_width=2)
    first, second = engine.llm.calls
    assert vars(first["sampling_params"].guided_decoding) == {"regex": "a+"}
    assert vars(first["lora_request"]) == {"name": "french", "number": 3, "path": "adapters/french"}
    assert (first["streaming"], second["streaming"]) == (True, False)


@pytest.mark.parametrize("error", [ValueError("bad"), TypeError("bad"), IndexError("bad"), RequestError("bad")])
@played
async def test_what_is_refused_is_the_requests_own_error(make: MakeEngine, error: Exception) -> None:
    engine = await make.begun()
    engine.llm.refusal = error
    engine.submit(1)
    await asyncio.sleep(0.1)
    assert engine.deltas == [Delta(1, [], None, FinishReason.ERROR, "bad")]
    assert not engine.running.done()


@pytest.mark.parametrize(("token", "error"), [(8, "torch"), (9, "token 9")])
@played
async def test_what_a_request_fails_with_before_the_engine_has_it_is_its_own_error(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, token: int, error: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    engine = await make.begun(vocab_size=9)
    engine.submit(1, logit_bias=((token, 1.0),))
    await asyncio.sleep(0.1)
    (end,) = (end for step in engine.steps for end in step.ends)
    # A token that the model does not have is the client's mistake.
    assert (isinstance(end.error, Refusal), error in str(end.error)) == (token == 9, True)
    assert (engine.llm.calls, engine.running.done()) == ([], False)


@pytest.mark.parametrize("where", ["submit", "response", "abort"])
@played
async def test_any_other_error_is_the_loss_of_the_engine(make: MakeEngine, where: str) -> None:
    engine, error = await make.begun(), ConnectionError("queue closed")
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
    engine.llm.has_shut_down = True
    with pytest.raises(ConnectionError, match="queue closed"):
        engine.executor.check()


@pytest.mark.parametrize(
    ("error", "told", "aborts"),
    [
        (RequestError("no room for it"), "no room for it", 0),
        # The engine does not know of an error that was found here.
        (ValueError("too few log-probabilities"), "too few log-probabilities", 1),
        (KeyError(5), "TensorRT-LLM's result cannot be read (KeyError: 5)", 1),
        (NotImplementedError("new"), "TensorRT-LLM's result cannot be read (NotImplementedError: new)", 1),
    ],
)
@played
async def test_an_error_of_a_response_ends_its_request_alone(
    make: MakeEngine, error: Exception, told: str, aborts: int
) -> None:
    engine = await make.begun()
    first, second = engine.submit(1), engine.submit(2)
    first.fail(error)
    second.say(7, end="length")
    await asyncio.sleep(0.1)
    ended = [Delta(2, [7], None, FinishReason.LENGTH), Delta(1, [], None, FinishReason.ERROR, told)]
    assert engine.deltas == ended
    assert first.aborts == aborts


@by_table("words", "lost", "options", apart=True)
@played
async def test_an_error_of_a_request_after_which_none_succeeds_is_the_loss_of_the_engine(
    make: MakeEngine, words: str, lost: bool, options: dict[str, Any]
) -> None:
    engine = await make.begun(**options)
    engine.submit(1).fail(RequestError(words))
    await asyncio.sleep(0.1)
    assert [delta.finish for delta in engine.deltas] == ([] if lost else [FinishReason.ERROR])
    if lost:
        with pytest.raises(EngineLostError, match=f"TensorRT-LLM cannot go on: {words}"):
            await engine.running


# -- cancelling --------------------------------------------------------------------------------------------------------


@played
async def test_a_cancelled_request_is_aborted_once_and_ends_with_the_engines_last_response(make: MakeEngine) -> None:
    engine = await make.begun()
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


@pytest.mark.parametrize("error", [AttributeError("no cum_log_probs"), RequestError("no room"), ValueError("wrong")])
@played
async def test_a_cancelled_request_whose_result_raises_has_been_cancelled(
    make: MakeEngine, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's last response of a request that was aborted before its first token has no `cum_log_probs`."""
    engine = await make.begun()
    result = engine.submit(1)
    engine.executor.cancel(1)
    result.fail(error)
    await asyncio.sleep(0.1)
    assert engine.deltas == [Delta(1, [], None, FinishReason.CANCELLED)]
    assert (result.aborts, engine.executor.stats().running) == (1, 0)
    assert "Traceback" not in capsys.readouterr().err


@played
async def test_a_request_that_the_engine_drops_without_a_word_is_ended_after_a_second(make: MakeEngine) -> None:
    engine = await make.begun()
    engine.submit(1)
    engine.executor.cancel(1)
    await asyncio.sleep(0.95)
    assert engine.executor.stats().running == 1
    await asyncio.sleep(0.6)
    assert engine.deltas == [Delta(1, [], None, FinishReason.CANCELLED)]
    assert engine.executor.stats().running == 0


@played
async def test_a_late_response_of_a_dropped_request_ends_none_that_came_again_with_its_id(make: MakeEngine) -> None:
    engine = await make.begun()
    dropped = engine.submit(1)
    engine.executor.cancel(1)
    await asyncio.sleep(2)
    again = engine.submit(1)
    dropped.say(end="cancelled")
    await asyncio.sleep(0.1)
    engine.executor.cancel(1)
    assert (again.aborts, engine.executor.stats().running) == (1, 1)
    again.say(end="cancelled")
    await asyncio.sleep(0.1)
    assert engine.deltas == [Delta(1, [], None, FinishReason.CANCELLED)] * 2
    assert engine.executor.stats().running == 0


@by_table("backend", "fields", "aborted", apart=True)
@played
async def test_a_stream_with_log_probabilities_on_the_engine_backend_is_drained_unaborted(
    make: MakeEngine, backend: str, fields: dict[str, Any], aborted: int
) -> None:
    """TensorRT-LLM #10810."""
    engine = await make.begun(backend=backend, logprobs=True)
    result = engine.submit(1, **fields)
    engine.executor.cancel(1)
    assert result.aborts == aborted
    result.say(7)
    result.say(8, end="length")
    await asyncio.sleep(0.1)
    assert {delta.finish for delta in engine.deltas} == {FinishReason.CANCELLED}
    assert not any(delta.token_ids for delta in engine.deltas)


@played
async def test_a_request_that_scores_its_prompt_is_aborted_once_it_has_a_response(make: MakeEngine) -> None:
    engine = await make.begun("1.3.0")
    result = engine.submit(1, prompt_logprobs=1)
    engine.executor.cancel(1)
    await asyncio.sleep(3)
    assert result.aborts == 0
    result.say(7)
    await asyncio.sleep(3)
    assert (result.aborts, engine.executor.stats().running) == (1, 1)
    result.say(end="cancelled")
    await asyncio.sleep(0.1)
    assert engine.deltas == [Delta(1, [], None, FinishReason.CANCELLED)]


@played
async def test_an_abort_that_the_engine_never_follows_is_its_loss(make: MakeEngine) -> None:
    engine = await make.begun(hang_timeout=8.0)
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


SILENT = "TensorRT-LLM has been silent for {} seconds with {} requests in it (option.executor_hang_timeout)"


# -- the watch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hang_timeout", "tick"), [(60.0, 0.5), (4.0, 0.5), (1.0, 0.125)])
@played
async def test_an_engine_that_is_silent_for_the_timeout_is_lost_and_the_server_is_kept_quiet_until_then(
    make: MakeEngine, hang_timeout: float, tick: float
) -> None:
    """The server's own watch has the same timeout: this one's message says more."""
    engine, loop = make(hang_timeout=hang_timeout), asyncio.get_running_loop()
    began = loop.time()
    await engine.begin()
    engine.submit(1)
    engine.submit(2)
    with pytest.raises(EngineLostError) as caught:
        await engine.running
    assert str(caught.value) == SILENT.format(f"{hang_timeout:g}", 2)
    assert loop.time() - began == pytest.approx(hang_timeout + tick, abs=0.01)
    # Signs of life, often enough for a watch that looks eight times per timeout.
    gaps = [later - earlier for earlier, later in zip([began, *engine.sent_at], engine.sent_at, strict=False)]
    assert max(gaps) <= 2 * tick
    assert engine.deltas == []


@played
async def test_the_silence_of_an_engine_goes_on_when_its_clients_have_given_up(make: MakeEngine) -> None:
    engine, loop = await make.begun(hang_timeout=8.0), asyncio.get_running_loop()
    began = loop.time()
    engine.submit(1)
    await asyncio.sleep(0.6)
    engine.executor.cancel(1)
    await asyncio.sleep(3)
    assert engine.deltas == [Delta(1, [], None, FinishReason.CANCELLED)]
    assert engine.executor.stats().running == 0
    with pytest.raises(EngineLostError) as caught:
        await engine.running
    assert str(caught.value) == SILENT.format("8", 1)
    assert loop.time() - began == pytest.approx(8.5)


@played
async def test_statistics_of_earlier_requests_are_no_sign_of_life(make: MakeEngine) -> None:
    """The first reading after an idle time brings what earlier requests have left."""
    engine, loop = await make.begun(hang_timeout=8.0, iteration_stats=True), asyncio.get_running_loop()
    engine.submit(1).say(7, end="length")
    await asyncio.sleep(5.1)
    engine.llm.iterations = lambda: [{"iter": 1}] if loop.time() - began < 1.5 else []
    began = loop.time()
    engine.submit(2)
    with pytest.raises(EngineLostError, match="has been silent for 8 seconds with 1 requests in it"):
        await engine.running
    assert loop.time() - began < 8.6


@pytest.mark.parametrize("answer", ["its own", "its error", "another's", "statistics"])
@played
async def test_any_sign_of_life_after_an_abort_ends_the_doubt_that_its_silence_raised(
    make: MakeEngine, answer: str
) -> None:
    """The PyTorch backend never answers a request that was aborted while it waited."""
    engine = await make.begun(hang_timeout=8.0, iteration_stats=answer == "statistics")
    first, second = engine.submit(1), engine.submit(2)
    second.say(7, end=None if answer == "another's" else "length")
    await asyncio.sleep(0.6)
    engine.executor.cancel(1)
    await asyncio.sleep(4)
    match answer:
        case "its own":
            first.say(end="cancelled")
        case "its error":
            first.fail(RequestError("no room for it"))
        case "another's":
            second.say(8, end="length")
        case _:
            engine.llm.iterations = lambda: [{"iter": 1}]
    await asyncio.sleep(60)
    assert not engine.running.done()
    assert [delta.finish for delta in engine.deltas if delta.request_id == 1] == [FinishReason.CANCELLED]


@played
async def test_an_engine_that_is_lost_behind_an_aborted_request_is_reported(make: MakeEngine) -> None:
    engine = await make.begun(hang_timeout=8.0)
    result = engine.submit(1)
    engine.executor.cancel(1)
    await asyncio.sleep(3)
    result.fail(RuntimeError("the proxy is gone"))
    with pytest.raises(RuntimeError, match="the proxy is gone"):
        await engine.running


@played
async def test_statistics_prove_that_an_engine_without_tokens_is_alive(make: MakeEngine) -> None:
    engine = make(hang_timeout=4.0, iteration_stats=True)
    count = itertools.count(1)
    engine.llm.iterations = lambda: [{"iter": next(count), "numQueuedRequests": 0, "numActiveRequests": 1}]
    await engine.begin()
    engine.submit(1)
    engine.submit(2)
    await asyncio.sleep(30.5)
    assert not engine.running.done()
    stats = engine.executor.stats()
    assert (stats.running, stats.queued, stats.iterations) == (1, 1, 30)
    without = await make.begun(hang_timeout=4.0)
    without.llm.iterations = engine.llm.iterations
    without.submit(1)
    with pytest.raises(EngineLostError, match="has been silent for 4 seconds with 1 requests"):
        await without.running


@played
async def test_statistics_that_cannot_be_read_are_gone_without(
    make: MakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    def iterations() -> list[dict[str, object]]:
        raise OSError("no statistics")

    engine = await make.begun(iteration_stats=True)
    engine.llm.iterations = iterations
    result = engine.submit(1)
    await asyncio.sleep(3)
    result.say(7, end="length")
    await asyncio.sleep(0.1)
    assert engine.deltas == [Delta(1, [7], None, FinishReason.LENGTH)]
    captured = capsys.readouterr()
    assert captured.out.count("iteration statistics cannot be read") == 1
    assert "OSError: no statistics" in captured.err


# -- whether it is there -----------------------------------------------------------------------------------------------


def test_a_worker_that_has_ended_is_reported_by_its_id(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    dead: list[int] = []
    monkeypatch.setattr(module, "dead", lambda ranks: dead)
    engine = make()
    engine.executor.check()
    dead += [7, 70]
    with pytest.raises(EngineLostError, match=r"a worker process of TensorRT-LLM is gone \(pid 7, 70\)"):
        engine.executor.check()


def test_what_ended_a_worker_says_more_than_its_end_also_where_it_comes_later(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "dead", lambda ranks: [7])
    engine = make()
    monkeypatch.setattr(time, "sleep", lambda seconds: engine.llm.errors.put(RuntimeError("in the worker")))
    for _ in range(2):  # it stays where it is
        with pytest.raises(EngineLostError, match="TensorRT-LLM cannot go on: RuntimeError: in the worker"):
            engine.executor.check()


# -- the end -----------------------------------------------------------------------------------------------------------


@played
async def test_closing_shuts_the_engine_down_and_follows_no_request_any_more(make: MakeEngine) -> None:
    engine = await make.begun()
    results = [engine.submit(1), engine.submit(2)]
    engine.executor.cancel(2)
    await asyncio.sleep(2)
    before = engine.deltas
    await engine.executor.close()
    for result in results:
        result.say(7)
    await asyncio.sleep(0.1)
    assert (engine.llm.shutdowns, engine.deltas) == (1, before)


@played
async def test_a_shutdown_that_hangs_is_waited_for_a_few_seconds(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHUTDOWN_SECONDS", 0.05)
    release = threading.Event()
    engine = await make.begun()
    engine.llm.shut_down = lambda: release.wait(60)
    try:
        await engine.executor.close()
        assert engine.llm.shutdowns == 1
    finally:
        release.set()


# -- code that a checkpoint names --------------------------------------------------------------------------------------


def test_no_code_that_a_checkpoint_names_reaches_tensorrt_llm_unless_it_is_trusted(
    tmp_path: Path, make: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = tmp_path / "wolf"
    model.mkdir()
    config = {"auto_map": {"AutoConfig": "own.Config"}, "model_type": "llama"}
    files = {"config.json": json.dumps(config), "weights.bin": "w", "list.json": "[1]", "broken.json": "{"}
    for name, text in files.items():
        (model / name).write_text(text)
    (model / "tokenizer.json").write_text(json.dumps({"auto_map": 1, "padding": "x" * (4 << 20)}))

    def given(backend: str, **arguments: Any) -> Path:
        return Path(make(backend=backend, model=str(model), arguments=arguments).llm.arguments["model"])

    for backend, trusted in (("tensorrt", False), ("tensorrt", True), ("pytorch", True), ("autodeploy", True)):
        assert given(backend, trust_remote_code=trusted) == model
    assert capsys.readouterr().out == ""
    for backend in ("pytorch", "autodeploy"):
        folder = given(backend)
        assert folder != model and folder.name == "wolf"
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama"}
        for name in ("weights.bin", "list.json", "broken.json", "tokenizer.json"):
            assert (folder / name).read_bytes() == (model / name).read_bytes(), name
        assert "config.json" in (said := capsys.readouterr().out) and "option.trust_remote_code=true" in said
    (model / "config.json").write_text("{}")
    assert given("pytorch") == model, "nothing is left out"


def test_first_requests_are_made_where_they_are_asked_for(make: MakeEngine) -> None:
    assert make().executor.first_requests()
    assert make(warm_up=False).executor.first_requests() == []
