"""The fake is as unkind as TensorRT-LLM: each test holds one rule, and names the section of the facts that it is from.

Rules without a section come from TensorRT-LLM's source, whose file is named.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving_process import wait_until

from djl_trtllm.config.tensorrt_llm_names import KNOWN_VERSIONS, members, owners

from . import fake_tensorrt_llm
from .programs import scenarios

PROMPT = scenarios.PROMPT

Call = tuple[str, dict[str, Any]]


def call(scenario: str, **arguments: Any) -> Call:
    """A scenario of `programs/scenarios.py` and what it is asked."""
    return scenario, arguments


def start(directory: Path, *calls: Call, **installation: Any) -> subprocess.Popen[str]:
    """A process that goes through `calls`, with a fake TensorRT-LLM."""
    environ = fake_tensorrt_llm(directory, **installation)
    return subprocess.Popen(
        [sys.executable, scenarios.__file__, json.dumps(calls, default=str)],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Observer:
    """Runs scenarios. Keyword arguments are those of `fake_tensorrt_llm`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.printed = ""

    def __call__(self, *calls: Call, **installation: Any) -> Any:
        """What the scenario saw; a list where there are several. `printed` is what the process printed."""
        process = start(self._directory, *calls, **installation)
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        self.printed = output + errors
        assert process.returncode == 0, self.printed
        seen = json.loads(output.rstrip().rsplit("\n", 1)[-1])
        return seen if len(calls) > 1 else seen[0]


@pytest.fixture(scope="session")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Observer:
    return Observer(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="session")
def engine(observe: Observer, tiny_stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory of 1.2.1."""
    directory = tmp_path_factory.mktemp("engine") / "saved"
    observe(call("build_and_save", model=tiny_stories, engine=directory))
    return directory


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_signatures_are_those_of_the_names_table(observe: Observer, version: str) -> None:
    seen, unknown_types = observe(call("signatures"), call("types_in_the_table"), version=version)
    checked = 0
    for owner, names in seen.items():
        kinds = ("argument", "field", "attribute", "enum")
        assert names == sorted(n for n, m in members(owner, version).items() if m.kind in kinds), owner
        checked += len(names)
    present = {owner for owner in owners() if members(owner, version)}
    assert present - set(seen) <= {"generate_async", "LLM", "BaseLlmArgs", "RequestOutput", "LLM.autodeploy"}
    assert checked > 200
    assert unknown_types == []


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1", "1.3.0"])
def test_results_and_llms_have_what_the_table_says(observe: Observer, tiny_stories: Path, version: str) -> None:
    assert observe(call("members_of_results", model=tiny_stories), version=version) == []


@pytest.mark.parametrize(
    ("version", "there"), [("1.0.0", True), ("1.2.1", True), ("1.3.0rc20", True), ("1.3.0rc21", False)]
)
def test_the_engine_backend_is_gone_from_1_3_0rc21(observe: Observer, version: str, there: bool) -> None:
    """§1.2: as files and as imports, with BuildConfig and the tensorrt distribution."""
    seen = observe(call("modules"), version=version)
    assert seen["files"] is there
    assert (seen["import"] is True) is there
    assert seen["BuildConfig"] is there
    assert ("PackageNotFoundError" in seen["tensorrt"]) is not there
    assert seen["version"] == seen["distribution"] == version


# -- constructors ------------------------------------------------------------------------------------------------------


def test_what_a_constructor_does_not_take_is_refused(observe: Observer, tiny_stories: Path) -> None:
    """§2.1 (unknown arguments), §1.3 (arguments and `backend` of the other class), §2.3 (cache type)."""
    cache = {"class": "KvCacheConfig", "dtype": "fp8"}
    seen = observe(
        call("construct", which="torch", model=tiny_stories, nothing=1),
        call("construct", which="engine", model=tiny_stories, nothing=1),
        call("construct", which="torch", model=tiny_stories, build_config=None, fast_build=True),
        call("construct", which="engine", model=tiny_stories, backend="tensorrt"),
        call("construct", which="torch", model=tiny_stories, kv_cache_config=[]),
        call("construct", which="engine", model=tiny_stories, guided_decoding_backend="llguidance"),
        call("construct", which="engine", model=tiny_stories, kv_cache_config=cache),
        call("construct", which="torch", model=tiny_stories, kv_cache_config=cache),
    )
    assert seen[0] == "ValueError: LLM got invalid argument: nothing"
    assert seen[1] == "ValueError: _TrtLLM got invalid argument: nothing"
    assert seen[2].startswith(
        "ValueError: The following arguments are specific to TensorRT backend and cannot be used with PyTorch backend: "
        "['build_config', 'fast_build']"
    )
    assert seen[3] == "ValueError: backend tensorrt is not supported."
    assert "ValidationError" in seen[4]
    assert "Unsupported guided decoding backend llguidance" in seen[5]
    assert "KvCacheConfig.dtype is not supported by the TensorRT backend." in seen[6]
    assert seen[7] == "constructed"


def test_too_few_gpus(observe: Observer, tiny_stories: Path) -> None:
    """§2.1"""
    calls = [
        call("construct", which=which, model=tiny_stories, tensor_parallel_size=4) for which in ("engine", "torch")
    ]
    assert observe(*calls, gpus=2) == ["RuntimeError: Only 2 GPUs are available, but 4 are required."] * 2


def test_configuration_objects_check_their_fields(observe: Observer) -> None:
    """§2.1: extra fields are forbidden. §2.5: the fields of DynamicBatchConfig are required before 1.3."""
    seen = observe(
        call("objects", kind="KvCacheConfig", nothing=1),
        call("objects", kind="KvCacheConfig", max_tokens="many"),
        call("objects", kind="SchedulerConfig", capacity_scheduler_policy="max_utilization"),
        call("objects", kind="DynamicBatchConfig"),
        call("objects", kind="KvCacheConfig", max_tokens=8),
        call("plugin_config"),
    )
    assert "Extra inputs are not permitted" in seen[0]
    assert "ValidationError" in seen[1]
    assert "ValidationError" in seen[2]
    assert "Field required" in seen[3]
    assert seen[4] == ["max_tokens"]
    assert seen[5]["constructor"].startswith("TypeError")
    assert seen[5]["set"] == 64
    assert "Error" in seen[5]["unknown"]
    assert observe(call("objects", kind="DynamicBatchConfig"), version="1.3.0") == []


# -- building and loading ----------------------------------------------------------------------------------------------


def test_a_saved_engine_directory_is_complete(observe: Observer, tiny_stories: Path, tmp_path: Path) -> None:
    """§3.1, §3.4"""
    seen = observe(
        call(
            "build_and_save",
            model=tiny_stories,
            engine=tmp_path / "engine",
            tensor_parallel_size=2,
            build_config={"class": "BuildConfig", "max_batch_size": 4},
            quant_config={"class": "QuantConfig", "quant_algo": "FP8"},
        ),
        gpus=2,
    )
    assert seen["files"] == ["config.json", "rank0.engine", "rank1.engine", "tokenizer.json", "tokenizer_config.json"]
    assert seen["steps"] == ["Loading HF model to memory", "Building TRT-LLM engine"]
    assert seen["ranks"] == 2
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert config["version"] == "1.2.1"
    assert config["pretrained_config"]["mapping"]["tp_size"] == 2
    assert config["pretrained_config"]["quantization"]["quant_algo"] == "FP8"
    assert config["build_config"]["max_batch_size"] == 4
    assert config["build_config"]["max_seq_len"] == 4096
    assert config["build_config"]["plugin_config"]["tokens_per_block"] == 32
    assert "Calibrating batch 0" in observe.printed
    assert "Loading Model" in observe.printed


def test_a_checkpoint_of_tensorrt_llm_is_built(
    observe: Observer, tiny_stories: Path, engine: Path, tmp_path: Path
) -> None:
    """§3.3; §3.1: without a tokenizer in it there is none in the engine."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    described = json.loads((engine / "config.json").read_text())["pretrained_config"]
    (checkpoint / "config.json").write_text(json.dumps(described))
    (checkpoint / "rank0.safetensors").write_bytes(b"")
    arguments = {"model": checkpoint, "tokenizer": tiny_stories}
    built, inconsistent = observe(
        call("build_and_save", engine=tmp_path / "engine", **arguments),
        call("construct", which="engine", tensor_parallel_size=2, **arguments),
        gpus=2,
    )
    assert built["steps"] == ["Loading TRT checkpoints to memory", "Build TRT-LLM engine"]
    assert built["files"] == ["config.json", "rank0.engine"]
    assert "tp_size 2 is not consistent with the checkpoint's tp_size 1" in inconsistent


@pytest.mark.parametrize(
    ("build_error", "message"),
    [
        ("oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate"),
        ("build_oom", "AssertionError: Engine building failed, please check the error log."),
        ("unsupported", "is not supported in TRT-LLM yet"),
        ("option", "ValueError"),
        ("something else", "RuntimeError: something else"),
    ],
)
def test_a_build_fails_in_its_phase(observe: Observer, tiny_stories: Path, build_error: str, message: str) -> None:
    script = {"build_error": build_error}
    assert message in observe(call("construct", which="engine", model=tiny_stories), script=script)


def test_what_is_no_engine_of_this_version_is_not_loaded(observe: Observer, engine: Path, tmp_path: Path) -> None:
    """§3.1 (old naming), §3.2 (another version), §2.4 (the PyTorch backend), and an unknown architecture."""
    renamed = shutil.copytree(engine, tmp_path / "renamed")
    (renamed / "rank0.engine").rename(renamed / "trt_llm_model_float16_tp1_rank0.engine")
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps({"builder_config": {}, "plugin_config": {}}))
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["NoSuchForCausalLM"], "num_attention_heads": 1})
    )
    seen = observe(
        call("construct", which="engine", model=renamed),
        call("construct", which="engine", model=old),
        call("construct", which="engine", model=tmp_path),
        call("construct", which="torch", model=engine),
        call("construct", which="engine", model=unknown),
    )
    assert "Error opening engine file" in seen[0]
    assert "Inferred model format HF, but failed to load config.json" in seen[1]
    assert "no config.json exists in" in seen[2]
    assert "Unrecognized model" in seen[3]
    message = "The given huggingface model architecture NoSuchForCausalLM is not supported in TRT-LLM yet"
    assert seen[4] == f"NotImplementedError: {message}"
    another = observe(call("construct", which="engine", model=engine), version="1.0.0")
    assert another.startswith("RuntimeError: Executor worker returned error <- RuntimeError: ")
    assert "Failed to deserialize cuda engine" in another
    assert "stdArchiveReader" in observe.printed


def test_an_engines_own_configuration_wins(observe: Observer, engine: Path) -> None:
    """§2.3: larger limits are clamped with a warning, a build_config is ignored with one, parallelism is fixed."""
    build = {"class": "BuildConfig", "max_batch_size": 1}
    clamped, ignored, parallel = observe(
        call("settled", which="engine", model=engine, max_batch_size=5000, max_num_tokens=100_000),
        call("settled", which="engine", model=engine, max_batch_size=9, build_config=build),
        call("construct", which="engine", model=engine, tensor_parallel_size=2),
        gpus=2,
    )
    assert (clamped["max_batch_size"], clamped["max_num_tokens"]) == (2048, 8192)
    assert "[W] max_batch_size [5000] is clamped" in observe.printed
    assert ignored["max_batch_size"] == 9
    assert "The build_config is ignored for model format of TLLM_ENGINE." in observe.printed
    assert "tp_size 2 is not consistent with the engine's tp_size 1" in parallel


@pytest.mark.parametrize(("version", "settled"), [("1.2.1", None), ("1.3.0", 2048)])
def test_none_stands_for_a_default_from_1_3_on(
    observe: Observer, tiny_stories: Path, version: str, settled: int | None
) -> None:
    """§1.4"""
    seen = observe(call("settled", which="torch", model=tiny_stories, max_batch_size=None), version=version)
    assert seen["max_batch_size"] == settled


@pytest.mark.parametrize(
    ("load_error", "message"),
    [("oom", "Executor creation failed due to insufficient GPU memory."), ("deserialize", "Failed to deserialize")],
)
def test_an_error_of_the_worker_at_start_is_the_cause(
    observe: Observer, tiny_stories: Path, load_error: str, message: str
) -> None:
    """§5.2, §7.3"""
    seen = observe(call("construct", which="torch", model=tiny_stories), script={"load_error": load_error})
    assert seen.startswith("RuntimeError: Executor worker returned error <- RuntimeError: ")
    assert message in seen


# -- requests ----------------------------------------------------------------------------------------------------------


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


def test_adapters(observe: Observer, tiny_stories: Path, tmp_path: Path) -> None:
    """§2.7. Without enable_lora an adapter is left out without a word (executor/base_worker.py)."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 128}))
    adapter = {"class": "LoRARequest", "lora_name": "a", "lora_int_id": 2, "lora_path": str(tmp_path)}
    asked = {"which": "torch", "model": tiny_stories, "requests": [{"max_tokens": 3, "lora_request": adapter}]}
    wide = {"class": "LoraConfig", "max_lora_rank": 128}
    applied, refused, ignored = observe(
        call("requests", **asked, enable_lora=True, lora_config=wide),
        call("requests", **asked, enable_lora=True),
        call("requests", **asked),
    )
    assert applied[0]["tokens"] == [7, 8, 9]
    assert refused[0].startswith("RequestError") and "low_rank" in refused[0]
    assert ignored[0]["tokens"] == [5, 6, 7]


# -- scheduling --------------------------------------------------------------------------------------------------------


def test_what_runs_at_once(observe: Observer, engine: Path) -> None:
    """Up to max_batch_size, in order. §5.1: in 8 blocks of 32 tokens fit 6 short requests and one whose output may be
    long, because the default policy reserves the whole output; the other one does not."""
    cache = {"class": "KvCacheConfig", "max_tokens": 256}
    policy = {"class": "SchedulerConfig", "capacity_scheduler_policy": "MAX_UTILIZATION"}
    batch, short, long, utilised = observe(
        call("order", model=engine, count=6, max_tokens=10, max_batch_size=2),
        call("order", model=engine, count=6, max_tokens=10, kv_cache_config=cache),
        call("order", model=engine, count=2, max_tokens=230, kv_cache_config=cache),
        call("order", model=engine, count=2, max_tokens=120, kv_cache_config=cache, scheduler_config=policy),
        script={"steps_per_second": 400},
    )
    assert batch["most"] == 2
    assert [set(batch["began"][place : place + 2]) for place in (0, 2, 4)] == [{0, 1}, {2, 3}, {4, 5}]
    assert (short["most"], long["most"], utilised["most"]) == (6, 1, 2)


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


# -- aborts ------------------------------------------------------------------------------------------------------------


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
    for seen in (by_engine, by_torch):
        assert seen["reason"] == "cancelled"
        assert len(seen["tokens"]) >= 8
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
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGSEGV
    seen = observe(call("abort", which="torch", model=tiny_stories, after=2, logprobs=1), script=script)
    assert seen["reason"] == "cancelled"


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
def test_behind_a_dead_worker_everything_waits_for_ever(observe: Observer, tiny_stories: Path, version: str) -> None:
    """§7.3: requests are still taken, shutdown does not return, and the health check of 1.3 sees nothing."""
    answers = observe(
        call("dead_worker", model=tiny_stories, how="killed"),
        call("dead_worker", model=tiny_stories, how="stopped"),
        version=version,
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


def test_an_error_of_the_engine_is_raised_at_the_next_request(observe: Observer, tiny_stories: Path) -> None:
    """§7.3: those that wait are not told, and afterwards the LLM is shut down."""
    script = {"faults": [{"action": "raise", "at_token": 2, "max_new_tokens": 9}]}
    seen = observe(call("background_error", model=tiny_stories), script=script)
    assert seen["waiting"] == "hangs"
    assert seen["next"].startswith("CppExecutorError: scripted engine failure")
    assert seen["then"] == "RuntimeError: LLM is shutting down"


def test_a_cuda_error_fails_every_active_request(observe: Observer, tiny_stories: Path) -> None:
    """executorImpl.cpp: and all that follow."""
    script = {"steps_per_second": 50, "faults": [{"action": "cuda", "at_token": 2, "max_new_tokens": 9}]}
    asked = [{"max_tokens": 9}, {"max_tokens": 100}]
    seen = observe(call("requests", which="torch", model=tiny_stories, requests=asked, together=True), script=script)
    assert all("an illegal memory access was encountered" in answer for answer in seen)


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


def test_no_rank_outlives_a_killed_caller(tmp_path: Path, tiny_stories: Path) -> None:
    process = start(tmp_path, call("be_killed", model=tiny_stories))
    printed, _ = process.communicate(timeout=60)
    pids = json.loads(printed.rstrip().rsplit("\n", 1)[-1])
    assert pids
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="the ranks' end")


# -- the record --------------------------------------------------------------------------------------------------------


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
