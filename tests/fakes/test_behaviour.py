"""What the fake does in folders, over time and by chance: each test names the section of the facts of its rule.

Rules without a section come from TensorRT-LLM's source, whose file is named. rules.json has those that are a row.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from djl_trtllm.backends.tensorrt_llm.names import KNOWN_VERSIONS, members, owners
from tests.fakes.installation import PROMPT, Observer, call, start
from tests.support.adapters import lora_tensors, write_adapter
from tests.support.processes import wait_until


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


@pytest.mark.parametrize(("stored", "built"), [("bfloat16", "bfloat16"), ("float32", "float16"), (None, "float16")])
def test_auto_is_the_checkpoints_number_format_but_never_32_bits(
    observe: Observer, tiny_stories: Path, tmp_path: Path, stored: str | None, built: str
) -> None:
    model = Path(shutil.copytree(tiny_stories, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config.pop("torch_dtype", None)
    (model / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    observe(call("build_and_save", model=model, engine=tmp_path / "engine"))
    saved = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert saved["pretrained_config"]["dtype"] == built
    assert saved["build_config"]["plugin_config"]["dtype"] == built


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


@pytest.mark.parametrize(
    ("stored", "version", "engine", "torch"),
    [
        ({"quant_method": "awq"}, "1.2.1", "Unsupported quantization_config", "Unsupported quantization_config"),
        ({"quant_method": "gptq"}, "1.3.0rc20", "Unsupported quantization_config", "Unsupported quantization_config"),
        ({"quant_method": "fp8"}, "1.2.1", "Unsupported quantization_config", "Unsupported quantization_config"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "1.2.1", "constructed", "constructed"),
        ({"quant_method": "mxfp4"}, "1.2.1", "has no attribute 'moe_config'", "constructed"),
    ],
)
def test_few_formats_of_hugging_face_are_loaded(
    observe: Observer,
    tiny_stories: Path,
    tmp_path: Path,
    stored: dict[str, object],
    version: str,
    engine: str,
    torch: str,
) -> None:
    """`llmapi/llm_utils.py`, `_update_from_hf_quant_config`."""
    model = Path(shutil.copytree(tiny_stories, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": stored}
    (model / "config.json").write_text(json.dumps(config))
    seen = observe(*(call("construct", which=which, model=model) for which in ("engine", "torch")), version=version)
    assert engine in seen[0]
    assert torch in seen[1]


# -- aborts and failures -----------------------------------------------------------------------------------------------


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


def test_no_rank_outlives_a_killed_caller(tmp_path: Path, tiny_stories: Path) -> None:
    process = start(tmp_path, call("be_killed", model=tiny_stories))
    printed, _ = process.communicate(timeout=120)
    pids = json.loads(printed.rstrip().rsplit("\n", 1)[-1])
    assert pids
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="the ranks' end")


# -- requests ----------------------------------------------------------------------------------------------------------


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
        assert each["error"].startswith(expected)
        assert each["next"] == "blocks"  # it sends aborts of what waits, and its worker is gone
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


def drawn(observe: Observer, model: Path, seeds: list[int | None], version: str = "1.2.1", **arguments: Any) -> Any:
    """The tokens of one sampled request after the other."""
    requests = [{"max_tokens": 2, "temperature": 1.0, "seed": seed} for seed in seeds]
    made = {"which": "torch", "model": model, **arguments}
    seen = observe(call("requests", **made, requests=requests), version=version, script={"sampled": True})
    return [answer["tokens"] for answer in seen]


def test_seeds(observe: Observer, tiny_stories: Path) -> None:
    """TorchSampler: one generator, seed 42 (_torch/pyexecutor/sampler.py, about 1.2); requests' seeds since #17172."""
    first, second, again, none = drawn(observe, tiny_stories, [1, 2, 1, None], sampler_type="TRTLLMSampler")
    assert first == again != second and none not in (first, second)
    first, _, again, _ = drawn(observe, tiny_stories, [1, 2, 1, 1])
    assert first != again
    first, second, again = drawn(observe, tiny_stories, [1, 2, 1], version="1.4.0rc0")
    assert first == again != second
