"""Building and loading: each test holds one rule of TensorRT-LLM, and names the section of the facts that it is from.

Rules without a section come from TensorRT-LLM's source, whose file is named.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .observing import Observer, call


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
    )
    assert "Extra inputs are not permitted" in seen[0]
    assert "ValidationError" in seen[1]
    assert "ValidationError" in seen[2]
    assert "Field required" in seen[3]
    assert seen[4] == ["max_tokens"]
    assert observe(call("objects", kind="DynamicBatchConfig"), version="1.3.0") == []


def test_plugins_are_checked_and_auto_is_known_late(observe: Observer) -> None:
    """`plugin/plugin.py` of 29,952 characters (1.2)."""
    seen = observe(call("plugin_config"))
    assert (seen["constructor"], seen["set"], seen["disabled"]) == (64, 64, None)
    assert seen["unknown keyword"] is False
    assert "ValidationError" in seen["unknown"] or "ValueError" in seen["unknown"]
    assert "Input should be 'fp8'" in seen["wrong"]
    assert (seen["auto"], seen["auto later"]) == ("float16", "bfloat16")


def test_before_1_2_plugins_are_attributes(observe: Observer) -> None:
    """`plugin/plugin.py` of 28,716 characters (about 1.0)."""
    seen = observe(call("plugin_config"), version="1.0.0")
    assert seen["constructor"].startswith("TypeError")
    assert seen["set"] == 64
    assert "Error" in seen["unknown"]


@pytest.mark.parametrize(
    ("kind", "version", "unknown", "wrong"),
    [
        ("BuildConfig", "1.0.0", "TypeError", "[max_batch_size]"),
        ("BuildConfig", "1.2.1", "[]", "ValidationError"),
        ("QuantConfig", "1.2.1", "TypeError", "[group_size]"),
        ("CalibConfig", "1.2.1", "ValidationError", "ValidationError"),
        ("LoraConfig", "1.2.1", "TypeError", "[max_lora_rank]"),
    ],
)
def test_which_objects_check_names_and_which_values(
    observe: Observer, kind: str, version: str, unknown: str, wrong: str
) -> None:
    """The JSON schema of 1.2.1; before 1.2 BuildConfig is a dataclass (builder.py@008b2b8d)."""
    field = {"BuildConfig": "max_batch_size", "QuantConfig": "group_size", "LoraConfig": "max_lora_rank"}
    seen = observe(
        call("objects", kind=kind, nothing=1),
        call("objects", kind=kind, **{field.get(kind, "random_seed"): "many"}),
        version=version,
    )
    assert unknown in str(seen[0]).replace("'", "")
    assert wrong in str(seen[1]).replace("'", "")


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
    """§2.3: larger limits are clamped with a warning, a build_config is ignored with one, parallelism is fixed.

    More beams than the engine's are refused by the C++ runtime when it loads.
    """
    build = {"class": "BuildConfig", "max_batch_size": 1}
    clamped, ignored, parallel, beams = observe(
        call("settled", which="engine", model=engine, max_batch_size=5000, max_num_tokens=100_000),
        call("settled", which="engine", model=engine, max_batch_size=9, build_config=build),
        call("construct", which="engine", model=engine, tensor_parallel_size=2),
        call("construct", which="engine", model=engine, max_beam_width=4),
        gpus=2,
    )
    assert (clamped["max_batch_size"], clamped["max_num_tokens"]) == (2048, 8192)
    assert "[W] max_batch_size [2048] is overridden by build_config.max_batch_size [2048]" in observe.printed
    assert "[W] max_beam_width [4] is overridden by build_config.max_beam_width [1]" in observe.printed
    assert "Runtime configured max beam width (4) must not exceed engine max beam width (1)" in beams
    assert ignored["max_batch_size"] == 9
    assert "The build_config is ignored for model format of TLLM_ENGINE." in observe.printed
    assert "tp_size 2 is not consistent with the engine's tp_size 1" in parallel


@pytest.mark.parametrize(("limit", "built"), [("max_batch_size", 2048), ("max_num_tokens", 8192)])
def test_a_limit_above_the_engines_is_an_error_before_1_2(
    observe: Observer, tiny_stories: Path, limit: str, built: int
) -> None:
    """llmapi/llm_args.py, and a log of 1.1.0."""
    build = {"class": "BuildConfig", limit: built}
    made = call("construct", which="engine", model=tiny_stories, build_config=build, **{limit: built + 1})
    message = f"{limit} [{built + 1}] is greater than build_config.{limit} [{built}] in build_config"
    assert message in observe(made, version="1.1.0")
    assert observe(made) == "constructed"


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
