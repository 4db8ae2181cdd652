"""Requests: each test holds one rule of TensorRT-LLM, and names the section of the facts that it is from.

Rules without a section come from TensorRT-LLM's source, whose file is named.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.adapters import lora_tensors, write_adapter

from .observing import PROMPT, Observer, call


def test_every_step_is_the_same_object_and_every_response_a_step(
    observe: Observer, tiny_stories: Path, engine: Path
) -> None:
    """§2.6: differences hold until the next step, a backlog is not put together. §2.7: parameters are changed."""
    by_engine, by_torch, by_threes = observe(
        call("streaming", which="engine", model=engine),
        call("streaming", which="torch", model=tiny_stories),
        call("streaming", which="torch", model=tiny_stories, stream_interval=3),
    )
    for seen in (by_engine, by_torch):
        assert seen["same"] == [True] * 4
        assert seen["diffs"] == [[5], [6], [7], [8]]
        assert seen["totals"] == [1, 2, 3, 4]
        assert seen["backlog"] == [1, 1, 1, 1]
        assert seen["mutated"] == [2, 1]
        assert (seen["reason"], seen["finished"]) == ("length", True)
        assert seen["default_max_tokens"] == 32
    # §2.4: the first token comes at once.
    assert by_threes["diffs"] == [[5], [6, 7], [8]]


def test_without_a_running_loop_only_the_synchronous_way_works(observe: Observer, tiny_stories: Path) -> None:
    """§2.6"""
    seen = observe(call("without_loop", model=tiny_stories))
    assert seen["error"].startswith("AssertionError: The asyncio event loop was not present during initialization")
    assert seen["sync"] == [[5], [6], [7]]


def test_a_request_error_is_raised_by_the_iterator_and_nothing_follows(observe: Observer, tiny_stories: Path) -> None:
    """§2.6: the result is not finished then, and a further step waits for ever. Others are served."""
    script = {"faults": [{"action": "error", "at_token": 2, "max_new_tokens": 9, "message": "no luck"}]}
    seen = observe(call("error_is_raised_by_the_iterator", model=tiny_stories), script=script)
    assert seen["steps"] == ["step", "step", "RequestError: no luck", "hangs"]
    assert seen["finished"] is False
    assert seen["next"]["reason"] == "length"


def test_sampling_parameters_are_checked_when_made(observe: Observer) -> None:
    """§2.7"""
    guides = {"class": "GuidedDecodingParams", "json_object": True, "regex": "a"}
    seen = observe(
        call("objects", kind="SamplingParams", nothing=1),
        call("objects", kind="SamplingParams", n=2),
        call("objects", kind="SamplingParams", top_p=2.0),
        call("objects", kind="SamplingParams", n=2, best_of=1, top_k=3),
        call("objects", kind="SamplingParams", guided_decoding=guides),
        call("objects", kind="SamplingParams", n=2, temperature=1.0),
        call("objects", kind="LoRARequest", lora_name="a", lora_int_id=1, lora_path="/nowhere"),
    )
    assert seen[0].startswith("TypeError")
    assert "does not allow multiple returns" in seen[1]
    assert seen[2:5] == [
        "ValueError: require 0 <= top_p <= 1, got top_p=2.0",
        "ValueError: best_of (1) cannot be less than n (2)",
        "ValueError: Only one guide can be used for a request, but got 2.",
    ]
    assert seen[5] == ["n", "temperature"]
    assert seen[6] == "ValueError: lora_path (/nowhere) does not exist."


def test_ends(observe: Observer, tiny_stories: Path, engine: Path) -> None:
    """§2.6. The end token is output of the PyTorch sampler and not of the engine's (samplingTopKKernels.cu)."""
    asked = [
        {"max_tokens": 9},
        {"max_tokens": 9, "ignore_eos": True},
        {"max_tokens": 9, "stop_token_ids": [7]},
        {"max_tokens": 9, "stop_token_ids": [7], "include_stop_str_in_output": True},
        {"max_tokens": 3, "stop_token_ids": [7]},
        {"max_tokens": 9, "min_tokens": 7},
    ]
    by_engine, by_torch = observe(
        call("requests", which="engine", model=engine, requests=asked),
        call("requests", which="torch", model=tiny_stories, requests=asked),
        script={"end_after": 4},
    )
    assert [(end["tokens"], end["reason"], end["stop"]) for end in by_engine] == [
        ([5, 6, 7, 8], "stop", None),
        ([5, 6, 7, 8, 2, 5, 6, 7, 8], "length", None),
        ([5, 6], "stop", 7),
        ([5, 6, 7], "stop", 7),
        ([5, 6], "stop", 7),
        ([5, 6, 7, 8, 9, 5, 6], "stop", None),
    ]
    ends = [(end["tokens"], end["reason"], end["stop"]) for end in by_torch]
    assert ends[0] == ([5, 6, 7, 8, 2], "stop", None)
    # At the last token, length comes before stop words (TorchSampler._handle_stop_criteria).
    assert ends[4] == ([5, 6, 7], "length", None)


def test_string_stops(observe: Observer, tiny_stories: Path) -> None:
    """§2.7: they need the setup that an explicit end_id leaves out. §2.6: they cut the client's text."""
    asked = [{"max_tokens": 4, "stop": "x", "end_id": 2}, {"max_tokens": 4, "stop": "x"}]
    (refused, served), seen = observe(
        call("requests", which="torch", model=tiny_stories, requests=asked),
        call("reading", which="torch", model=tiny_stories),
    )
    assert refused == (
        "RequestError: SamplingParams.stop (x) is not processed by tokenizer, please call the setup method."
    )
    assert served["reason"] == "length"
    assert seen["whole"].startswith("the little dog ran to the big tree")
    assert seen["stopped"].rstrip() == "the little dog ran to the"
    assert (seen["reason"], seen["why"]) == ("stop", "big")


def test_prompts_that_are_too_long(observe: Observer, tiny_stories: Path, engine: Path) -> None:
    """§7.1: refused in another way by each version and backend; max_tokens is clamped with a warning."""
    long = {"prompt": [5] * 101, "max_tokens": 4}
    message = "The sum of prompt length (101.0), query length (0) should not exceed max_num_tokens (100)"
    limited = call("requests", which="torch", model=tiny_stories, requests=[long], max_num_tokens=100)
    assert observe(limited, version="1.3.0") == [f"RequestError: {message}"]
    asked = [{"prompt": [5] * 4000, "max_tokens": 97}, {"prompt": [5] * 4096, "max_tokens": None}]
    clamped = [{"prompt": [5] * 4090, "max_tokens": 50}, {"prompt": [5] * 4090, "max_tokens": None}, {"prompt": []}]
    by_limit, by_engine, by_torch = observe(
        limited,
        call("requests", which="engine", model=engine, requests=asked),
        call("requests", which="torch", model=tiny_stories, requests=clamped),
    )
    assert by_limit == [f"ValueError: {message}"]
    assert by_engine == [
        "ValueError: The sum of prompt length (4000.0) and query length (0) max_tokens (97) should not exceed "
        "max_seq_len (4096)",
        "RequestError: `max_tokens` must be set when `default_max_tokens` is illegal",
    ]
    assert [len(by_torch[0]["tokens"]), len(by_torch[1]["tokens"])] == [6, 6]
    assert "User-specified `max_tokens` (50) is greater than deduced `default_max_tokens` (6)" in observe.printed
    assert by_torch[2] == "IndexError: list index out of range"


def test_a_token_that_the_model_does_not_have(observe: Observer, tiny_stories: Path) -> None:
    """When the request becomes active: `PyExecutor._validate_request` in py_executor.py (about 1.2)."""
    asked = [{"prompt": [5, 2048], "max_tokens": 4}, {"prompt": [5, 2047], "max_tokens": 4}]
    refused, served = observe(call("requests", which="torch", model=tiny_stories, requests=asked))
    assert refused == "RequestError: Token ID out of range"
    assert served["reason"] == "length"


def test_features_need_their_argument_of_the_constructor(observe: Observer, tiny_stories: Path, engine: Path) -> None:
    """§2.3 (log-probabilities), §8 (guided decoding)"""
    guided = [{"max_tokens": 9, "guided_decoding": {"class": "GuidedDecodingParams", "json_object": True}}]
    asked = [{"max_tokens": 2, "logprobs": 1}, {"max_tokens": 2, "prompt_logprobs": 1}, *guided]
    without, with_backend = observe(
        call("requests", which="engine", model=engine, requests=asked),
        call("requests", which="torch", model=tiny_stories, requests=guided, guided_decoding_backend="xgrammar"),
    )
    assert "requires `gather_generation_logits=True`" in without[0]
    assert "requires `gather_context_logits=True`" in without[1]
    assert without[2].startswith("RequestError") and "GuidedDecodingConfig is not setup" in without[2]
    assert with_backend[0]["reason"] == "stop"


def test_with_gathered_logits_the_worker_is_no_process_of_its_own(
    observe: Observer, tiny_stories: Path, engine: Path
) -> None:
    """§4.3. A refused request is raised by generate_async then (executor/worker.py)."""
    asked = [{"max_tokens": 4, "stop": "x", "end_id": 2}]
    by_engine, refused, by_torch = observe(
        call("logprobs", which="engine", model=engine, gather_generation_logits=True),
        call("requests", which="engine", model=engine, requests=asked, gather_generation_logits=True),
        call("logprobs", which="torch", model=tiny_stories),
    )
    assert by_engine == {"steps": [[5], [6], [7]], "worker processes": 0}
    assert refused[0].startswith("RequestError")
    assert "Using single process worker for TP1" in observe.printed
    assert by_torch == {"steps": [[5], [6], [7]], "worker processes": 1}


def test_several_sequences(observe: Observer, tiny_stories: Path) -> None:
    """Only the one that ends the request gets a reason (executor/result.py). §2.6: beams come whole each time, and the
    PyTorch backend takes requests of exactly max_beam_width (executor_request_queue.py)."""
    sampled, beams, refused = observe(
        call("outputs", which="torch", model=tiny_stories, request={"max_tokens": 3, "n": 2, "temperature": 1.0}),
        call(
            "outputs",
            which="torch",
            model=tiny_stories,
            request={"max_tokens": 3, "n": 2, "use_beam_search": True},
            max_beam_width=2,
        ),
        call("requests", which="torch", model=tiny_stories, requests=[{}], max_beam_width=2),
    )
    assert [sequence["tokens"] for sequence in sampled] == [[5, 6, 7], [6, 7, 8]]
    assert [sequence["reason"] for sequence in sampled] == [None, "length"]
    assert [sequence["tokens"] for sequence in beams] == [[5, 6, 7], [6, 7, 8]]
    assert {sequence["reason"] for sequence in beams} == {"length"}
    assert refused == ["RequestError: Request beam width 1 is not equal to max_beam_width 2. This is not supported!"]


def test_beams_end_one_by_one(observe: Observer, tiny_stories: Path, engine: Path) -> None:
    """executor/result.py (about 1.2): each beam has a reason of its own in the response that ends the request."""
    asked = {"max_tokens": 3, "n": 3, "use_beam_search": True}
    build = {"class": "BuildConfig", "max_beam_width": 3}
    by_torch, by_engine = observe(
        call("outputs", which="torch", model=tiny_stories, request=asked, max_beam_width=3),
        call("outputs", which="engine", model=tiny_stories, request=asked, build_config=build),
        script={"end_after": 1},
    )
    assert [sequence["reason"] for sequence in by_torch] == ["stop", "stop", "length"]
    assert [sequence["tokens"] for sequence in by_torch] == [[5, 2], [6, 7, 2], [7, 8, 9]]
    assert [sequence["tokens"] for sequence in by_engine] == [[5], [6, 7], [7, 8, 9]]


def test_adapters(observe: Observer, tiny_stories: Path, tmp_path: Path) -> None:
    """§2.7. Without enable_lora an adapter is left out without a word (executor/base_worker.py)."""
    write_adapter(tmp_path, lora_tensors(rank=128))
    adapter = {"class": "LoRARequest", "lora_name": "a", "lora_int_id": 2, "lora_path": str(tmp_path)}
    asked = {"which": "torch", "model": tiny_stories, "requests": [{"max_tokens": 3, "lora_request": adapter}]}
    wide = {"class": "LoraConfig", "max_lora_rank": 128}
    by_torch, ignored = observe(
        call("requests", **asked, enable_lora=True, lora_config=wide),
        call("requests", **asked),
    )
    assert by_torch[0]["tokens"] == [7, 8, 9]
    assert ignored[0]["tokens"] == [5, 6, 7]


def test_adapters_that_do_not_fit(observe: Observer, tiny_stories: Path, engine: Path, tmp_path: Path) -> None:
    """The C++ executor refuses the request; PyTorch's loop ends (py_executor.py, `prepare_resources`)."""
    write_adapter(tmp_path / "wide", lora_tensors(rank=128))
    write_adapter(tmp_path / "other", lora_tensors(hidden=128))
    first = [{"max_tokens": 3, "lora_request": lora_request(tmp_path / name)} for name in ("wide", "other")]
    *by_torch, by_engine = observe(
        *(
            call("rounds", which="torch", model=tiny_stories, rounds=[[asked], [{"max_tokens": 3}]], enable_lora=True)
            for asked in first
        ),
        call("rounds", which="engine", model=engine, rounds=[[asked] for asked in first], enable_lora=True),
    )
    assert by_torch == [[["hangs"], ["hangs"]]] * 2
    assert "low_rank must be smaller than mMaxLowRank (64)" in by_engine[0][0]
    assert "Expected shape[-1] of 256 but got 128" in by_engine[1][0]


def test_an_adapter_that_cannot_be_loaded_is_the_end_of_its_worker(
    observe: Observer, tiny_stories: Path, tmp_path: Path
) -> None:
    """Only a RequestError is caught around `submit` (worker_main in executor/worker.py; PR 13517 is open)."""
    for name in ("empty", "foreign", "half", "broken"):
        write_adapter(tmp_path / name, lora_tensors())
    (tmp_path / "empty" / "adapter_model.safetensors").unlink()
    write_adapter(tmp_path / "foreign", lora_tensors(["attention.c_attn"]))
    write_adapter(tmp_path / "half", dict(list(lora_tensors().items())[:1]))
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"0")
    seen = observe(
        *(
            call(
                "background_error",
                model=tiny_stories,
                ends_worker=True,
                enable_lora=True,
                lora_request=lora_request(tmp_path / name),
            )
            for name in ("empty", "foreign", "half", "broken")
        )
    )
    told = [
        "ValueError: Failed to load adapter_model from",
        "AssertionError: hf_module c_attn is not in supported list",
        "ValueError: base_model.model.model.layers.0.self_attn.q_proj is missing required matrices",
        "JSONDecodeError",
    ]
    for each, expected in zip(seen, told, strict=True):
        assert each["waiting"] == ["hangs"]
        assert each["next"].startswith(expected)
        assert each["then"] == "RuntimeError: LLM is shutting down"


def lora_request(folder: Path) -> dict[str, object]:
    return {"class": "LoRARequest", "lora_name": folder.name, "lora_int_id": 2, "lora_path": str(folder)}


def test_what_runs_at_once(observe: Observer, engine: Path) -> None:
    """Up to max_batch_size, in order. §5.1: in 8 blocks of 32 tokens fit 6 short requests and one whose output may be
    long, because the default policy reserves the whole output; the other one does not."""
    cache = {"class": "KvCacheConfig", "max_tokens": 256}
    policy = {"class": "SchedulerConfig", "capacity_scheduler_policy": "MAX_UTILIZATION"}
    # Slow enough for all to be there before the first one ends.
    batch, short = observe(
        call("order", model=engine, count=6, max_tokens=10, max_batch_size=2),
        call("order", model=engine, count=6, max_tokens=10, kv_cache_config=cache),
        script={"steps_per_second": 10},
    )
    long, utilised = observe(
        call("order", model=engine, count=2, max_tokens=230, kv_cache_config=cache),
        call("order", model=engine, count=3, max_tokens=120, kv_cache_config=cache, scheduler_config=policy),
        script={"steps_per_second": 100},
    )
    assert batch["most"] == 2
    assert [set(batch["began"][place : place + 2]) for place in (0, 2, 4)] == [{0, 1}, {2, 3}, {4, 5}]
    assert (short["most"], long["most"], utilised["most"]) == (6, 1, 3)
    # One of the three was paused and went on.
    assert utilised["tokens"] == 3 * 120


def test_statistics(observe: Observer, tiny_stories: Path, engine: Path) -> None:
    """§2.6: nothing before the first request, and what a timeout ended stays ended until the next one."""
    seen, silent, asked = observe(
        call("statistics", which="engine", model=engine),
        call("statistics", which="torch", model=tiny_stories),
        call("statistics", which="torch", model=tiny_stories, enable_iter_perf_stats=True),
        script={"steps_per_second": 50},
    )
    assert seen["before"] == []
    assert [entry["iter"] for entry in seen["first"]] == [1, 2, 3, 4]
    assert seen["first"][0]["kvCacheStats"]["usedNumBlocks"] == 1
    assert seen["first"][0]["inflightBatchingStats"]["numContextRequests"] == 1
    assert seen["ended"] == 0
    assert silent["first"] == []
    assert asked["first"][0]["numActiveRequests"] == 1


def test_calls_are_recorded_with_what_was_passed_explicitly(
    observe: Observer, tiny_stories: Path, tmp_path: Path
) -> None:
    log = tmp_path / "calls.jsonl"
    cache = {"class": "KvCacheConfig", "max_tokens": 64}
    asked = [{"max_tokens": 2}]
    observe(call("requests", which="torch", model=tiny_stories, requests=asked, kv_cache_config=cache), log=log)
    construction, request = (json.loads(line) for line in log.read_text().splitlines())
    assert construction == {
        "call": "LLM.pytorch",
        "arguments": {"model": str(tiny_stories), "kv_cache_config": cache},
    }
    assert request["call"] == "generate_async"
    assert request["arguments"]["inputs"] == PROMPT
    assert request["arguments"]["sampling_params"] == {"class": "SamplingParams", "detokenize": False, "max_tokens": 2}
