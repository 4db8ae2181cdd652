"""OpenVINO as a backend: which files it runs, what options become in its plan, its KV cache, its engines' limits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.base import effects_on
from djl_trtllm.backends.effects import has_effect
from djl_trtllm.backends.openvino.backend import OpenVinoBackend, OpenVinoPlan, PoolingPlan
from djl_trtllm.backends.openvino.kv_cache import KvCachePlan, block_bytes, plan_kv_cache
from djl_trtllm.backends.planning import choose_backend, plan_engine, plan_fitted
from djl_trtllm.config import Backend, Config, Quantization, Task
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.sources import Origin
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import ConfigError, EngineError, EngineMismatchError, LayoutError
from djl_trtllm.model import Layout, ModelKind, ModelShape, inspect
from tests.engines.helpers import CONTEXT, CPU_ONLY, configured, gpu_machine, write_checkpoint, write_engine_files
from tests.support.encoders import scripted_encoder, write_modules
from tests.support.tables import by_table
from tests.support.vision import PROCESSOR


def test_an_engine_directory_names_its_own_backend(tmp_path: Path) -> None:
    layout = inspect(write_engine_files(tmp_path / "engine"))
    reason = f"{layout.path} is a compiled OpenVINO engine"
    for config in (configured(), configured(backend="openvino")):
        assert choose_backend(config, layout, gpu_machine()) == (Backend.OPENVINO, reason)
    with pytest.raises(EngineError, match=r"option\.backend=tensorrt .*serve it with option\.backend=openvino"):
        choose_backend(configured(backend="tensorrt"), layout, gpu_machine())


def test_tensorrt_llms_files_are_refused() -> None:
    layout = Layout(ModelKind.TENSORRT_ENGINE, Path("/models/it"), {"version": "1.2.0"}, (), None)
    offer = OpenVinoBackend().offer(layout, CPU_ONLY)
    assert offer == (None, f"OpenVINO cannot load a {ModelKind.TENSORRT_ENGINE.value}")
    with pytest.raises(EngineError, match=r"option\.backend=openvino .*: /models/it is a .*serve the Hugging Face"):
        choose_backend(configured(backend="openvino"), layout, CPU_ONLY)


def test_the_options_that_openvino_has() -> None:
    effects = effects_on(Backend.OPENVINO)
    assert {name for name in effects if has_effect(OPTIONS[name], effects)} == {
        *("max_input_len", "max_output_len", "max_seq_len", "max_rolling_batch_size", "max_num_sequences"),
        *("max_num_tokens", "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction", "kv_cache_dtype"),
        *("dtype", "quantize", "awq_format", "enable_kv_cache_reuse", "inference_num_threads", "stream_interval"),
        "limit_mm_per_prompt",
        *("trust_remote_code", "speculative_config", "speculative_decoding_mode", "speculative_draft_model"),
        *("speculative_length", "limit_mm_per_prompt"),
    }


@pytest.mark.parametrize("module", ["executor", "pooling_executor", "guides", "compile"])
def test_no_process_with_openvino_writes_an_identifier_for_its_vendor(module: str, tmp_path: Path) -> None:
    # CI is a reason for it to say nothing.
    environ = {name: value for name, value in os.environ.items() if name != "CI"} | {"HOME": str(tmp_path)}
    program = f"import djl_trtllm.backends.openvino.{module}, openvino, sys; print(sys.modules['openvino_telemetry'])"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr


# -- the plan ----------------------------------------------------------------------------------------------------------


def planned(checkpoint: Path, **options: object) -> OpenVinoPlan:
    plan = plan_engine(configured(**options), inspect(checkpoint), CPU_ONLY)
    assert isinstance(plan, OpenVinoPlan)
    return plan


def with_config(checkpoint: Path, to: Path, **changes: object) -> Path:
    shutil.copytree(checkpoint, to)
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return to


def test_the_executors_options_are_complete(checkpoint: Path, tmp_path: Path) -> None:
    plan = planned(checkpoint, inference_num_threads=2, enable_kv_cache_reuse="true")
    assert plan.at(tmp_path).executor_options() == {
        "engine_dir": str(tmp_path),
        "max_num_batched_tokens": 256,
        "num_kv_blocks": 32 * 9,
        "enable_prefix_caching": True,
        "keeps_keys_apart": False,
        "kv_cache_precision": "f16",
        "inference_precision": "f32",
        "num_threads": 2,
        "max_sequences": 32,
        "max_seq_len": CONTEXT,
        "scores_prompts": True,
    }
    with pytest.raises(ValueError, match="no engine yet"):
        plan.executor_options()


@by_table("options", "expected")
def test_what_options_become_in_the_plan(
    checkpoint: Path, options: dict[str, object], expected: dict[str, object]
) -> None:
    plan = planned(checkpoint, **options)
    assert {name: getattr(plan, name) for name in expected} == expected


@by_table("options", "told")
def test_what_a_plan_lowers_is_said(checkpoint: Path, options: dict[str, object], told: str | None) -> None:
    notes = [note for note in planned(checkpoint, **options).notes if "rotary_dim" not in note]
    assert notes == [] if told is None else any(told in note for note in notes)


@pytest.mark.parametrize(
    ("name", "stored", "expected"),
    [
        *(("float16", b"F16", "fp16"), ("bfloat16", b"F16", "bf16"), ("float32", b"F16", "fp32")),
        *((None, b"F16", "fp16"), (None, b"F32", "fp32"), (None, b"I64", "fp16")),
    ],
)
def test_auto_keeps_the_checkpoints_number_format(
    checkpoint: Path, tmp_path: Path, name: str | None, stored: bytes, expected: str
) -> None:
    """It is read from the weights where config.json does not have it."""
    model = with_config(checkpoint, tmp_path / "m", dtype=name)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"F16", stored))
    assert planned(model).dtype == expected


@by_table("options", "words")
def test_what_has_no_counterpart_is_refused_with_what_replaces_it_all_at_once(
    checkpoint: Path, options: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(checkpoint, **options)
    assert len(caught.value.problems) == len(options)
    assert all(word in "\n".join(caught.value.problems) for word in words)


def test_what_is_not_installed_is_named_with_how_to_install_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image for GPUs; planning for another machine goes on."""
    monkeypatch.setattr("djl_trtllm.backends.openvino.backend.find_spec", lambda name: None)
    made = planned(checkpoint, backend="openvino").at(tmp_path)
    with pytest.raises(
        EngineError, match=r"^backend openvino \(option\.backend=openvino.*pip install 'djl-trtllm\[cpu"
    ):
        made.executor_options()


@pytest.mark.parametrize("compile_only", [False, True])
def test_a_model_without_attention_is_refused_before_it_is_compiled(
    checkpoint: Path, tmp_path: Path, compile_only: bool
) -> None:
    model = with_config(checkpoint, tmp_path / "model", model_type="mamba")
    with pytest.raises(EngineError, match=r"model is a mamba model, which has no attention: .* TensorRT-LLM on a GPU"):
        plan_engine(configured(), inspect(model), CPU_ONLY, compile_only=compile_only)


# -- the KV cache ------------------------------------------------------------------------------------------------------

SHAPE = ModelShape(num_layers=2, num_kv_heads=2, head_dim=16)
BLOCK = 2 * 2 * 2 * 16 * 2 * 32
"""Bytes in f16: keys and values of 32 tokens in each layer. A sequence of 256 tokens is charged 9 blocks."""
TOKENS, FRACTION = "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction"


def kv_cache(config: Config, *, memory: int = 10**9, shape: ModelShape = SHAPE, length: int = 256) -> KvCachePlan:
    return plan_kv_cache(config, shape, max_seq_len=length, max_sequences=4, available_memory=memory)


@by_table("options", "memory", "blocks", "reason")
def test_the_size_of_the_kv_cache(options: dict[str, Any], memory: int, blocks: int, reason: str) -> None:
    plan = kv_cache(configured(**options), memory=memory)
    assert (plan.blocks, plan.block_bytes, plan.precision) == (blocks, BLOCK, "f16")
    assert plan.reason.startswith(reason)
    assert plan.longest_sequence == (blocks - 1) * 32


@by_table("options", "memory", "words")
def test_a_cache_that_does_not_fit_is_refused(options: dict[str, Any], memory: int, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        kv_cache(configured(**options), memory=memory)
    (problem,) = caught.value.problems
    assert all(word in problem for word in words), problem


@by_table("asked", "precision", "size")
def test_the_precision_is_pinned_and_decides_the_size_of_a_block(asked: str, precision: str, size: int) -> None:
    plan = kv_cache(configured(kv_cache_dtype=asked))
    assert (plan.precision, plan.block_bytes) == (precision, size)


@pytest.mark.parametrize("unknown", ["num_layers", "num_kv_heads", "head_dim"])
def test_a_model_of_unknown_shape_needs_the_number_of_tokens(unknown: str) -> None:
    shape = replace(SHAPE, **{unknown: None})
    with pytest.raises(ConfigError, match=r"option\.max_tokens_in_paged_kv_cache is not set, and .*config\.json"):
        kv_cache(configured(), shape=shape)
    plan = kv_cache(configured(max_tokens_in_paged_kv_cache=3200), shape=shape)
    assert (plan.blocks, plan.block_bytes) == (100, None)


# -- an engine's own limits --------------------------------------------------------------------------------------------

LIMITS = {"max_rolling_batch_size": 8, "max_input_len": 511, "max_output_len": 511, "max_seq_len": 512}


def built_limits(path: Path, config: Config, limits: object = LIMITS) -> dict[str, object] | None:
    """The defaults that the manifest of an engine gives."""
    head = {"format": 1, "backend": "openvino", "checkpoint": "", "versions": {}, "platform": "", "created": ""}
    content = {**head, "options": {}, "files": {}, **({} if limits is None else {"limits": limits})}
    (path / "manifest.json").write_text(json.dumps(content))
    built = OpenVinoBackend().built(config, Layout(ModelKind.OPENVINO_ENGINE, path, {}, (), None))
    if built is None:
        return None
    assert built.where == f"limits in {path / 'manifest.json'}" and not built.bounds
    return dict(built.defaults)


@by_table("options", "kept")
def test_the_limits_of_the_manifest_are_defaults(
    tmp_path: Path, options: dict[str, object], kept: dict[str, object]
) -> None:
    assert built_limits(tmp_path, configured(**options)) == kept


def test_a_number_of_sequences_that_nobody_set_is_that_of_the_engine(tmp_path: Path) -> None:
    config = configured().replace(Origin.derived("a preset"), max_num_sequences=64)
    found = built_limits(tmp_path, config)
    assert found == LIMITS | {"max_num_sequences": 8}


@pytest.mark.parametrize("unknown", [False, True])
def test_prompts_are_scored_where_the_weights_fit_into_memory_twice_beside_the_cache(
    checkpoint: Path, tmp_path: Path, unknown: bool
) -> None:
    """The second time in 32 bits, and while they are loaded twice: four times their bytes."""
    model = with_config(checkpoint, tmp_path / "m", num_attention_heads=None) if unknown else checkpoint
    config, layout = configured(max_tokens_in_paged_kv_cache=320), inspect(model)
    weights = layout.shape.parameter_bytes or sum(path.stat().st_size for path in layout.weight_files)
    cache = 0 if unknown else 10 * (block_bytes(layout.shape, "f16") or 0)
    for memory in (4 * weights + cache, 4 * weights + cache - 1):
        plan = plan_engine(config, layout, replace(CPU_ONLY, available_memory=memory))
        assert isinstance(plan, OpenVinoPlan)
        assert plan.scores_prompts == (not unknown and memory == 4 * weights + cache)


def test_a_manifest_without_limits_says_nothing_and_a_damaged_one_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    assert built_limits(tmp_path, configured(), None) is None
    assert built_limits(tmp_path, configured(), {}) is None
    with pytest.raises(EngineMismatchError):
        built_limits(tmp_path, configured(), "many")
    assert OpenVinoBackend().built(configured(), inspect(checkpoint)) is None


# -- models that take images -------------------------------------------------------------------------------------------


def seeing(directory: Path) -> Layout:
    """A model of which the architecture takes images; its weights are those of another one."""
    write_checkpoint(directory)
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "qwen2_vl", "image_token_id": 7}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return inspect(directory)


def test_a_model_that_takes_images_is_compiled_with_the_parts_that_read_them(tmp_path: Path) -> None:
    layout = seeing(tmp_path / "model")
    asked = {"backend": "openvino", "enable_kv_cache_reuse": "true"}
    plan = plan_engine(configured(**asked), layout, CPU_ONLY)
    text = plan_engine(configured(**asked, limit_mm_per_prompt='{"image": 0}'), layout, CPU_ONLY)
    assert isinstance(plan, OpenVinoPlan) and isinstance(text, OpenVinoPlan)
    assert (plan.images, plan.compile_spec(tmp_path).task) == (True, "image-text-to-text")
    assert (text.images, text.compile_spec(tmp_path).task) == (False, "text-generation-with-past")
    assert plan.build_options != text.build_options  # each has an entry of its own in the engine cache
    # These work with ids of prompts alone.
    assert not (plan.enable_prefix_caching or plan.scores_prompts)
    assert text.enable_prefix_caching and text.scores_prompts


def test_what_has_no_effect_with_images_is_said(tmp_path: Path) -> None:
    layout = seeing(tmp_path / "model")
    plan = plan_engine(configured(backend="openvino", enable_kv_cache_reuse="true"), layout, CPU_ONLY)
    assert any("has no effect with images" in note for note in plan.notes)
    speculating = configured(backend="openvino", speculative_decoding_mode="ngram", speculative_length=3)
    with pytest.raises(ConfigError, match=r"limit_mm_per_prompt=\{\"image\": 0\}"):
        plan_engine(speculating, layout, CPU_ONLY)


def test_an_engine_says_itself_whether_it_takes_images(tmp_path: Path) -> None:
    engine = write_engine_files(tmp_path / "engine")
    for suffix in (".xml", ".bin"):
        (engine / f"openvino_model{suffix}").rename(engine / f"openvino_language_model{suffix}")
    config = configured(backend="openvino", max_tokens_in_paged_kv_cache=9999)
    layout = inspect(engine)
    assert layout.kind is ModelKind.OPENVINO_ENGINE
    plan = plan_engine(config, layout, CPU_ONLY)
    assert isinstance(plan, OpenVinoPlan) and plan.images
    (engine / "openvino_language_model.bin").unlink()
    with pytest.raises(LayoutError, match=r"openvino_language_model\.bin"):
        inspect(engine)


# -- models that embed or score ----------------------------------------------------------------------------------------


def pooling_planned(checkpoint: Path, hardware: Hardware = CPU_ONLY, **options: Any) -> tuple[Config, PoolingPlan]:
    config, plan = plan_fitted(configured(**options), inspect(checkpoint), hardware)
    assert isinstance(plan, PoolingPlan)
    return config, plan


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return write_modules(scripted_encoder(tmp_path), mode="cls_token", normalize=False, length=128)


def test_the_files_decide_what_the_executor_gets(encoder: Path) -> None:
    config, plan = pooling_planned(encoder)
    assert config.options.task is Task.EMBED
    assert plan.at(encoder).executor_options() == {
        "engine_dir": str(encoder),
        "task": "embed",
        "pooled": "cls",
        "activates": False,
        "pad_id": 0,
        "inference_precision": "f32",
        "num_threads": None,
        "max_sequences": 256,
        "max_seq_len": 128,
        "max_num_tokens": 1024,
    }
    assert (plan.max_input_len, config.options.job_queue_size) == (128, 4096)


def test_the_task_is_part_of_what_is_compiled(encoder: Path) -> None:
    _, plan = pooling_planned(encoder)
    assert plan.build_options["task"] == "embed"
    assert plan.compile_spec(encoder / "out").task == "feature-extraction"
    assert "normalised" not in plan.describe() and "first token" in plan.describe()


def test_a_cross_encoder_is_compiled_for_classification(tmp_path: Path) -> None:
    config, plan = pooling_planned(scripted_encoder(tmp_path, labels=1))
    assert config.options.task is Task.SCORE
    assert plan.compile_spec(tmp_path / "out").task == "text-classification"
    assert "sigmoid" in plan.describe()


def test_a_quantisation_that_openvino_does_not_have_is_refused(encoder: Path) -> None:
    with pytest.raises(ConfigError, match="fp8"):
        pooling_planned(encoder, quantize=Quantization.FP8)
    _, plan = pooling_planned(encoder, kv_cache_dtype="fp8")
    assert plan.task is Task.EMBED, "there is no KV cache"


@pytest.mark.parametrize("backend", [Backend.TENSORRT, Backend.PYTORCH])
def test_an_engine_that_runs_no_such_models_is_refused_with_those_that_do(encoder: Path, backend: Backend) -> None:
    machine = gpu_machine()
    with pytest.raises(EngineError, match=r"option\.task=embed.*openvino"):
        pooling_planned(encoder, machine, backend=backend)
