from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.tensorrt_llm.built_engine import BuiltEngine, check_built_engine, read_built_engine
from djl_trtllm.config import Config, load
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.errors import EngineMismatchError
from tests.engines.helpers import H200, configured, gpu_machine

# What TensorRT-LLM 1.2 writes for a Llama on two GPUs, less what nothing here looks at.
BUILT: dict[str, Any] = {
    "version": "1.2.1",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "mapping": {
            "world_size": 2, "tp_size": 2, "pp_size": 1, "cp_size": 1, "gpus_per_node": 8,
            "moe_tp_size": 2, "moe_ep_size": 1,
        },
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    },
    "build_config": {
        "max_input_len": 1024, "max_seq_len": 8192, "max_batch_size": 64, "max_beam_width": 1, "max_num_tokens": 4096,
        "opt_num_tokens": 64, "kv_cache_type": "PAGED", "gather_context_logits": False,
        "gather_generation_logits": False, "speculative_decoding_mode": 1, "max_draft_len": 0,
        "lora_config": {"lora_dir": [], "max_lora_rank": 64, "lora_target_modules": ["attn_q", "attn_v"]},
        "plugin_config": {
            "dtype": "bfloat16", "gemm_plugin": None, "nccl_plugin": "auto", "lora_plugin": None,
            "remove_input_padding": True, "context_fmha": True, "use_paged_context_fmha": True, "tokens_per_block": 32,
        },
    },
}  # fmt: skip
TWO = gpu_machine("1.2.1", 2)


def engine_dir(path: Path, config: object = BUILT) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def engine(**values: Any) -> BuiltEngine:
    """An engine with limits of 8192 and no flag that matters, but for the values given."""
    limits: dict[str, Any] = {"max_batch_size": 64, "max_seq_len": 8192, "max_num_tokens": 8192, "max_beam_width": 1}
    return BuiltEngine(Path("/engines/llama"), **(limits | values))


def manifest(platform: str) -> Manifest:
    return Manifest(
        format=1, backend="tensorrt", checkpoint="", options={}, versions={}, platform=platform, created="", files={}
    )


def notes(config: Config, built: BuiltEngine, hardware: Hardware = TWO, **further: Any) -> list[str]:
    return check_built_engine(config, built, hardware, **{"environ": {}, **further})


def mismatches(config: Config, built: BuiltEngine, hardware: Hardware = TWO, **further: Any) -> list[str]:
    with pytest.raises(EngineMismatchError) as caught:
        notes(config, built, hardware, **further)
    first, *lines, last = str(caught.value).splitlines()
    assert first == "the engine /engines/llama does not fit:" and "djl-trtllm compile CHECKPOINT OUT" in last
    assert all(line.startswith("  - ") for line in lines)
    return [line.removeprefix("  - ") for line in lines]


def test_what_an_engine_was_compiled_with_is_read_from_its_config(tmp_path: Path) -> None:
    built = read_built_engine(engine_dir(tmp_path))
    assert (built.directory, built.version) == (tmp_path, "1.2.1")
    assert (built.dtype, built.quant_algo, built.kv_cache_quant_algo) == ("bfloat16", "FP8", "FP8")
    assert (built.tp_size, built.pp_size, built.cp_size, built.world_size) == (2, 1, 1, 2)
    assert (built.moe_tp_size, built.moe_ep_size) == (2, 1)
    assert (built.max_batch_size, built.max_num_tokens, built.max_seq_len, built.max_input_len) == (
        64,
        4096,
        8192,
        1024,
    )
    assert (built.max_beam_width, built.tokens_per_block, built.kv_cache_type) == (1, 32, "PAGED")
    assert built.remove_input_padding and built.context_fmha and built.use_paged_context_fmha
    assert not built.gather_context_logits
    assert (built.lora, built.max_lora_rank) == (False, 64)
    assert built.built_with["nccl_plugin"] == "auto" and built.built_with["opt_num_tokens"] == 64


@pytest.mark.parametrize(("plugin", "lora"), [("auto", True), ("bfloat16", True), (None, False), ("disable", False)])
def test_adapters_are_compiled_in_with_their_plugin(tmp_path: Path, plugin: str | None, lora: bool) -> None:
    config = {"build_config": {"plugin_config": {"lora_plugin": plugin}}, "pretrained_config": {}}
    assert read_built_engine(engine_dir(tmp_path, config)).lora is lora


@pytest.mark.parametrize(
    "config",
    [
        {"build_config": {}},
        {"build_config": None, "pretrained_config": None},
        {"build_config": {"plugin_config": [], "max_batch_size": "64"}, "pretrained_config": {"mapping": 3}},
    ],
)
def test_what_a_config_does_not_tell_is_not_known_and_never_a_mismatch(tmp_path: Path, config: dict[str, Any]) -> None:
    built = read_built_engine(engine_dir(tmp_path, config))
    assert built.world_size == 1 and built.max_batch_size is None and built.use_paged_context_fmha is None
    everything = configured(
        max_rolling_batch_size=999, max_num_tokens=99999, max_seq_len=99999, dtype="fp16", kv_cache_dtype="int8",
        enable_kv_cache_reuse="true", enable_chunked_prefill="true", tokens_per_block=64,
    )  # fmt: skip
    assert check_built_engine(everything, built, gpu_machine(None), environ={}) == []


def test_an_unquantised_engine_has_no_algorithm(tmp_path: Path) -> None:
    for quantization in ({"quant_algo": None}, {"quant_algo": "NO_QUANT"}, {}):
        config = {"build_config": {}, "pretrained_config": {"quantization": quantization}}
        assert read_built_engine(engine_dir(tmp_path, config)).quant_algo is None


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineMismatchError, match=r"config\.json is missing"):
        read_built_engine(tmp_path)
    with pytest.raises(EngineMismatchError, match=r"not that of a compiled engine: it has no `build_config`"):
        read_built_engine(engine_dir(tmp_path, {"architectures": []}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineMismatchError, match=r"config\.json is not valid JSON"):
        read_built_engine(tmp_path)


def test_an_engine_of_before_0_8_is_refused_with_the_command(tmp_path: Path) -> None:
    config = {"builder_config": {"tensor_parallel": 2, "max_batch_size": 8}, "plugin_config": {}}
    (engine_dir(tmp_path, config) / "rank0.engine").touch()
    with pytest.raises(EngineMismatchError, match=r"before 0\.8 .*OPTION_TENSOR_PARALLEL_DEGREE=2 .*djl-trtllm"):
        read_built_engine(tmp_path)


@pytest.mark.parametrize(
    ("values", "chunked", "longest"),
    [
        ({"max_num_tokens": 4096}, False, 4096),
        ({"max_num_tokens": 4096}, True, 8191),
        ({"max_num_tokens": 9999}, False, 8191),
        ({"max_input_len": 1024}, False, 8191),
        ({"max_input_len": 1024, "remove_input_padding": False}, False, 1024),
        ({"max_input_len": 1024, "context_fmha": False}, False, 1024),
        ({"max_input_len": 1024, "context_fmha": False}, True, 8191),
        ({"max_seq_len": None, "max_num_tokens": None}, False, None),
    ],
)
def test_the_longest_prompt_is_bounded_by_what_the_executor_bounds_it_by(
    values: dict[str, Any], chunked: bool, longest: int | None
) -> None:
    assert engine(**values).longest_prompt(chunked_prefill=chunked) == longest


def test_an_engine_that_fits_has_nothing_to_tell(tmp_path: Path) -> None:
    built = read_built_engine(engine_dir(tmp_path))
    assert notes(configured(max_rolling_batch_size=64), built, manifest=manifest("sm_90")) == []


@pytest.mark.parametrize("compiled", ["1.2.0", "1.2.1rc1", "0.16.0"])
def test_an_engine_is_read_by_its_own_release_only(compiled: str) -> None:
    (line,) = mismatches(configured(), engine(version=compiled))
    assert line.startswith(f"TensorRT-LLM {compiled} compiled it and 1.2.1 is installed")
    assert f"tensorrt-llm=={compiled}" in line


@pytest.mark.parametrize(
    ("compiled", "installed"),
    [("1.2.1", "1.2.1+cu130"), (None, "1.2.1"), ("1.2.0", "of unknown version"), ("nightly", "1.2.1")],
)
def test_versions_that_are_one_release_or_not_known_fit(compiled: str | None, installed: str) -> None:
    assert notes(configured(), engine(version=compiled), gpu_machine(installed)) == []


def test_an_engine_runs_on_the_gpu_architecture_it_was_compiled_for() -> None:
    (line,) = mismatches(configured(), engine(), TWO, manifest=manifest("sm_80"))
    assert line == "it was compiled for sm_80, and NVIDIA H200 is sm_90"
    for platform in ("sm_90", "unknown", "x86_64"):
        assert notes(configured(), engine(), TWO, manifest=manifest(platform)) == []
    unknown = Hardware((type(H200)(),), "1.2.1", 1)
    assert notes(configured(), engine(), unknown, manifest=manifest("sm_80")) == []


def test_every_rank_needs_a_gpu() -> None:
    four = engine(tp_size=2, pp_size=2, world_size=4)
    assert notes(configured(), four, gpu_machine(gpus=4)) == []
    (line,) = mismatches(configured(), four, gpu_machine(gpus=1))
    assert line.startswith(
        "it was compiled for 4 GPUs (tensor parallel 2 x pipeline parallel 2), and 1 GPU is visible;"
    )
    assert "trtllm-llmapi-launch" in line


def test_gpus_of_other_machines_count_where_the_ranks_there_are_launched() -> None:
    built, here, launched = engine(tp_size=8, world_size=8), gpu_machine(gpus=4), {"TLLM_SPAWN_PROXY_PROCESS": "1"}
    assert notes(configured(), built, here, environ=launched) == []
    for name in ("num_nodes", "cluster_size"):
        assert notes(configured(**{name: 2}), built, here, environ=launched) == []
        (line,) = mismatches(configured(**{name: 2}), built, gpu_machine(gpus=2), environ=launched)
        assert f"2 GPUs are visible on this machine with option.{name}=2" in line
        (line,) = mismatches(configured(**{name: 2}), built, here)
        assert "start the server with trtllm-llmapi-launch" in line


@pytest.mark.parametrize(
    ("option", "size"),
    [
        ("tensor_parallel_degree", "tp_size"),
        ("pipeline_parallel_degree", "pp_size"),
        ("context_parallel_size", "cp_size"),
        ("moe_tensor_parallel_size", "moe_tp_size"),
        ("moe_expert_parallel_size", "moe_ep_size"),
    ],
)
def test_a_degree_that_was_asked_for_is_the_engines(option: str, size: str) -> None:
    built = engine(**{size: 2})
    assert notes(configured(), built) == notes(configured(**{option: 2}), built) == []
    for other in (1, 4):
        (line,) = mismatches(configured(**{option: other}), built)
        assert line == (
            f"option.{option}={other} (environment variable OPTION_{option.upper()}): the engine was compiled with "
            f"{size} 2"
        )


def test_all_gpus_are_as_many_as_the_engine_was_compiled_for() -> None:
    assert notes(configured(tensor_parallel_degree="max"), engine(tp_size=2, world_size=2), gpu_machine(gpus=8)) == []


@pytest.mark.parametrize(
    ("option", "values", "limit"),
    [
        ("max_num_sequences", {}, "max_batch_size is 64"),
        ("max_rolling_batch_size", {}, "max_batch_size is 64"),
        ("max_seq_len", {}, "max_seq_len is 8192"),
        ("max_num_tokens", {}, "max_num_tokens is 8192"),
        ("max_beam_width", {}, "max_beam_width is 1"),
        ("max_input_len", {}, "longest prompt is 8191"),
        ("max_output_len", {}, "longest output is 8191"),
    ],
)
def test_a_limit_that_was_asked_for_is_within_the_engines(option: str, values: dict[str, Any], limit: str) -> None:
    (line,) = mismatches(configured(**{option: 9000}), engine(**values))
    assert line == f"option.{option}=9000 (environment variable OPTION_{option.upper()}): the engine's {limit}"


def test_the_sequences_of_the_engine_count_before_those_of_the_rolling_batch() -> None:
    assert notes(configured(max_num_sequences=64, max_rolling_batch_size=256), engine()) == []
    (line,) = mismatches(configured(max_num_sequences=65, max_rolling_batch_size=8), engine())
    assert line.startswith("option.max_num_sequences=65")


def test_a_default_above_the_engines_limit_gives_way_to_it_and_is_reported() -> None:
    small = engine(max_batch_size=16, max_seq_len=512, max_num_tokens=256)
    assert notes(configured(), small) == [
        "option.max_rolling_batch_size=32 (default) is overridden by the engine's max_batch_size, 16",
        "option.max_input_len=1024 (default) is overridden by the engine's longest prompt, 256",
        "option.max_output_len=512 (default) is overridden by the engine's longest output, 511",
    ]


def test_what_max_num_tokens_widens_gives_way_and_max_num_tokens_itself_does_not() -> None:
    told = notes(configured(max_num_tokens=8192), engine())
    assert [line.split("(")[0].strip() for line in told] == ["option.max_rolling_batch_size=256"]
    assert len(mismatches(configured(max_num_tokens=8193), engine())) == 1


def test_prompt_and_output_together_fit_into_a_sequence() -> None:
    built = engine(max_seq_len=2048)
    (line,) = mismatches(configured(max_input_len=1536, max_output_len=1024), built)
    assert "are 2560 tokens together: the engine's max_seq_len is 2048; lower one of them" in line
    (note,) = notes(configured(max_output_len=1536), built)
    assert note.endswith("are 2560 tokens together: the engine's max_seq_len is 2048, which applies")
    assert notes(configured(max_input_len=1536, max_output_len=1024, max_seq_len=2048), built) == []


@pytest.mark.parametrize(
    ("option", "value", "built", "says"),
    [
        ("dtype", "fp16", {"dtype": "bfloat16"}, "bf16"),
        ("kv_cache_dtype", "int8", {"dtype": "float16"}, "fp16"),
        ("kv_cache_dtype", "fp16", {"kv_cache_quant_algo": "INT8"}, "int8"),
        ("quant_algo", "W4A16_AWQ", {"quant_algo": "FP8"}, "FP8"),
        ("quant_algo", "FP8", {}, "NO_QUANT"),
        ("kv_cache_quant_algo", "FP8", {}, "none"),
        ("tokens_per_block", "64", {"tokens_per_block": 32}, "32"),
    ],
)
def test_a_format_that_was_asked_for_is_the_engines(option: str, value: str, built: dict[str, Any], says: str) -> None:
    (line,) = mismatches(configured(**{option: value}), engine(**built))
    assert line.startswith(f"option.{option}={value} ") and line.endswith(f"the engine was compiled with {says}")


def test_formats_that_agree_or_that_nobody_asked_for_fit() -> None:
    built = engine(dtype="float16", kv_cache_quant_algo="INT8", quant_algo="FP8", tokens_per_block=32)
    agreeing = configured(
        dtype="fp16", kv_cache_dtype="int8", quant_algo="FP8", kv_cache_quant_algo="INT8", tokens_per_block=32
    )
    assert notes(agreeing, built) == notes(configured(), built) == notes(configured(dtype="auto"), built) == []


@pytest.mark.parametrize(
    ("option", "flag", "built"),
    [
        ("enable_kv_cache_reuse", "use_paged_context_fmha", {"use_paged_context_fmha": False}),
        ("enable_chunked_prefill", "use_paged_context_fmha", {"use_paged_context_fmha": False}),
        ("gather_context_logits", "gather_context_logits", {}),
        ("gather_all_token_logits", "gather_context_logits", {}),
        ("enable_lora", "lora_plugin", {}),
    ],
)
def test_a_feature_needs_an_engine_that_was_compiled_for_it(option: str, flag: str, built: dict[str, Any]) -> None:
    (line,) = mismatches(configured(**{option: "true"}), engine(**built))
    assert line == (
        f"option.{option}=true (environment variable OPTION_{option.upper()}) needs an engine with {flag}, and "
        "this one was compiled without"
    )
    able = engine(use_paged_context_fmha=True, gather_context_logits=True, lora=True)
    assert notes(configured(**{option: "true"}), able) == notes(configured(), engine(**built)) == []


def test_generation_logits_are_turned_on_at_run_time() -> None:
    assert (
        notes(configured(gather_generation_logits="true"), engine(built_with={"gather_generation_logits": False})) == []
    )


def test_the_rank_of_adapters_counts_where_adapters_are_served() -> None:
    built = engine(lora=True, max_lora_rank=16)
    (line,) = mismatches(configured(enable_lora="true", max_lora_rank=32), built)
    assert line.startswith("option.max_lora_rank=32") and line.endswith("the engine's max_lora_rank is 16")
    (note,) = notes(configured(enable_lora="true"), built)
    assert note.startswith("option.max_lora_rank=64 (default) is overridden by the engine's ")
    assert notes(configured(max_lora_rank=32), built) == []


def test_in_flight_batching_needs_a_paged_cache() -> None:
    (line,) = mismatches(configured(), engine(kv_cache_type="CONTINUOUS"))
    assert line == "its KV cache is CONTINUOUS, and in-flight batching needs a paged one"
    assert notes(configured(batching_type="static"), engine(kv_cache_type="CONTINUOUS")) == []


def test_a_flag_of_the_build_that_differs_has_no_effect_and_is_reported() -> None:
    built = engine(built_with={"gemm_plugin": None, "use_fused_mlp": True, "opt_num_tokens": 64})
    (note,) = notes(configured(gemm_plugin="auto", use_fused_mlp="true", opt_num_tokens=64), built)
    assert note == (
        "option.gemm_plugin=auto (environment variable OPTION_GEMM_PLUGIN) has no effect: the engine was compiled with "
        "gemm_plugin=none"
    )
    assert notes(configured(gemm_plugin="disable"), built) == []


def test_an_option_that_only_compiling_reads_has_no_effect_on_an_engine_and_is_reported() -> None:
    (note,) = notes(configured(calib_batches=8, sink_token_length=4), engine())
    assert note.endswith("OPTION_CALIB_BATCHES) has no effect: the engine is compiled already")


def test_every_mismatch_is_reported_at_once_with_where_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_num_sequences=128\noption.tensor_parallel_degree=4\n")
    config = load(tmp_path, {"OPTION_MAX_SEQ_LEN": "16384"})
    built = engine(version="1.0.0", tp_size=2, world_size=2)
    assert mismatches(config, built, gpu_machine("1.2.1", 1), manifest=manifest("sm_100")) == [
        "TensorRT-LLM 1.0.0 compiled it and 1.2.1 is installed: an engine is read by its own release only; install "
        "tensorrt-llm==1.0.0, or use its container",
        "it was compiled for sm_100, and NVIDIA H200 is sm_90",
        "it was compiled for 2 GPUs (tensor parallel 2 x pipeline parallel 1), and 1 GPU is visible; with GPUs of "
        "several machines, start the server with trtllm-llmapi-launch",
        f"option.tensor_parallel_degree=4 ({tmp_path}/serving.properties:2): the engine was compiled with tp_size 2",
        "option.max_seq_len=16384 (environment variable OPTION_MAX_SEQ_LEN): the engine's max_seq_len is 8192",
        f"option.max_num_sequences=128 ({tmp_path}/serving.properties:1): the engine's max_batch_size is 64",
    ]
