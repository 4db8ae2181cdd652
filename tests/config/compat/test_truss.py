from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.config import Config, OriginKind, resolve
from djl_trtllm.config.compat import truss
from djl_trtllm.config.compat.truss_names import (
    IGNORED,
    OPTION_OF,
    TO_ACT_ON,
)
from djl_trtllm.config.explain import as_json, render
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.errors import ConfigError
from tests.config.helpers import printed


def from_text(text: str) -> Config:
    return resolve(truss.parse_config(text, "config.yaml"))


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        from_text(text)
    return caught.value.problems


def nested(name: str, value: str) -> str:
    """`a.b` and `1` as YAML: `a: {b: 1}`, under a key by which a Truss is known."""
    *sections, last = name.split(".")
    text = f"{last}: {value}"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return f"python_version: py311\n{text}\n" if name.partition(".")[0] != "python_version" else f"{text}\n"


@pytest.mark.parametrize(
    ("name", "value", "option", "expected"),
    [
        ("model_metadata.tensor_parallelism", "2", "tensor_parallel_degree", 2),
        ("model_metadata.engine_repository", "org/engine", "model_id", "org/engine"),
        ("model_metadata.tokenizer_repository", "org/model", "tokenizer", "org/model"),
        ("build.arguments.engine_repository", "org/engine", "model_id", "org/engine"),
        ("trt_llm.serve.tensor_parallel_count", "4", "tensor_parallel_degree", 4),
        ("trt_llm.build.checkpoint_repository.repo", "org/model", "model_id", "org/model"),
        ("trt_llm.build.max_batch_size", "16", "max_rolling_batch_size", 16),
        ("trt_llm.build.quantization_type", "fp8_kv", "quantize", "fp8"),
        ("trt_llm.build.quantization_type", "WEIGHTS_INT8", "quantize", "int8"),
        ("trt_llm.build.plugin_configuration.use_paged_context_fmha", "true", "use_paged_context_fmha", True),
        ("trt_llm.runtime.kv_cache_free_gpu_mem_fraction", "0.8", "kv_cache_free_gpu_mem_fraction", 0.8),
        ("trt_llm.runtime.served_model_name", "mine", "model_name", "mine"),
        ("trt_llm.inference_stack", "v2", "backend", "pytorch"),
    ],
)
def test_a_value_becomes_its_option_and_keeps_its_line(name: str, value: str, option: str, expected: object) -> None:
    config = from_text(nested(name, value))
    assert getattr(config.options, option) == expected
    assert str(config.origin(option)) == "config.yaml:2"


def test_what_truss_presets_comes_with_its_engine_repository() -> None:
    config = from_text("model_metadata:\n  engine_repository: org/engine\n")
    assert config.options.max_num_sequences == 64
    assert config.options.kv_cache_free_gpu_mem_fraction == 0.1
    assert config.options.max_tokens_in_paged_kv_cache == 10000
    assert config.origin("max_num_sequences").kind is OriginKind.DERIVED
    assert "Truss" in str(config.origin("max_num_sequences"))
    assert not config.is_set("max_num_sequences")


def test_what_truss_presets_is_weaker_than_everything_and_is_not_reported_as_beaten() -> None:
    sources = truss.parse_config("trt_llm:\n  runtime:\n    max_batch_size: 8\n", "config.yaml")
    config = resolve(sources)
    assert config.options.max_rolling_batch_size == 8
    assert config.options.max_num_tokens == 8192
    assert not config.overridden and not config.warnings


def test_without_a_trusss_file_nothing_of_it_is_preset() -> None:
    assert resolve([]).options.max_num_sequences is None


def test_nothing_is_preset_beside_the_repository_of_the_truss() -> None:
    (source,) = truss.parse_config("model_metadata: {engine_repository: a/b}", "config.yaml", has_repository=True)
    assert resolve([source]).options.max_num_sequences is None


def test_the_whole_length_may_be_prompt_or_output() -> None:
    options = from_text("trt_llm:\n  build:\n    max_seq_len: 32768\n").options
    assert (options.max_seq_len, options.max_input_len, options.max_output_len) == (32768, 32768, 32768)
    text = "trt_llm:\n  build:\n    max_seq_len: 4000\n    max_input_len: 3000\n"
    assert from_text(text).options.max_input_len == 3000


def test_max_num_tokens_widens_no_batch() -> None:
    text = "trt_llm:\n  runtime:\n    max_num_tokens: 16384\n    max_batch_size: 32\n"
    assert from_text(text).options.max_rolling_batch_size == 32


@pytest.mark.parametrize("secret", ["my_hf_api_key", "hunter2"])
def test_the_token_of_the_hub_is_used_and_no_secret_is_shown(secret: str) -> None:
    text = f"model_metadata: {{tensor_parallelism: 1}}\nsecrets:\n  hf_access_token: {secret}\n  other: {secret}\n"
    config = from_text(text)
    assert config.options.hf_access_token == secret
    (warning,) = config.warnings
    assert "secrets.other (line 4): nothing reads this secret" in warning
    assert secret not in warning + printed(render(config)) + json.dumps(as_json(config))


def test_a_secret_in_trusss_own_store_is_fine() -> None:
    config = from_text("model_name: m\nsecrets:\n  hf_access_token: null\n")
    assert config.warnings == () and config.notes == ()


def test_a_name_without_effect_is_answered() -> None:
    assert len(IGNORED) > 40
    silent = []
    for name, answer in IGNORED.items():
        config = from_text(nested(name, "x"))
        told, other = (config.warnings, config.notes) if answer in TO_ACT_ON else (config.notes, config.warnings)
        if not any(line.endswith(f": {answer}") for line in told) or any(answer in line for line in other):
            silent.append(name)
    assert silent == []


def test_variables_are_named_and_their_values_are_not_shown() -> None:
    (warning,) = from_text("trt_llm: {}\nenvironment_variables:\n  HF_TOKEN: hunter2\n  OMP: '1'\n").warnings
    assert "environment_variables.HF_TOKEN (line 3)" in warning and "hunter2" not in warning


def test_a_misspelt_name_gets_a_suggestion() -> None:
    (warning,) = from_text("trt_llm:\n  build:\n    max_seq_length: 100\n").warnings
    assert "did you mean trt_llm.build.max_seq_len?" in warning


def test_gpus_that_do_not_fit_the_parallelism_are_reported() -> None:
    text = "model_metadata:\n  tensor_parallelism: 2\nresources:\n  accelerator: A100:4\n"
    assert any("4 GPUs" in warning and "need 2" in warning for warning in from_text(text).warnings)
    assert not any("parallelism need" in warning for warning in from_text(text.replace("A100:4", "A100:2")).warnings)


def test_a_checkpoint_from_elsewhere_is_reported() -> None:
    text = "trt_llm:\n  build:\n    checkpoint_repository:\n      source: GCS\n      repo: gs://b/m\n"
    assert any("set option.model_id" in warning for warning in from_text(text).warnings)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trt_llm:\n  build:\n\tmax_seq_len: 1\n", "config.yaml:3: this is not YAML.*spaces, not with tabs"),
        ("trt_llm: v2: x\n", "config.yaml:1: this is not YAML"),
        ("- trt_llm\n", "config.yaml:1: expected `key: value` lines"),
        ("colour: blue\n", "no config.yaml of Truss: expected one of the keys"),
        ("trt_llm:\n  inference_stack: v3\n", r"trt_llm.inference_stack=v3 \(config.yaml:2\): expected v1 or v2"),
        ("trt_llm:\n  build:\n    quantization_type: int5\n", "expected one of no_quant, fp8"),
        ("trt_llm: {}\nmodel_name: a\nmodel_name: b\n", "config.yaml:3: model_name is here and on line 2; keep one"),
        ("trt_llm:\n  runtime:\n    max_batch_size: many\n", "trt_llm.runtime.max_batch_size=many.*a whole number"),
    ],
)
def test_a_mistake_is_reported_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_text(text)


_VALUES = st.text(max_size=8) | st.sampled_from(["", "null", "true", "8", "0.1", "fp8", "v2", "A100:2", "[1, 2]", "{}"])


@given(
    st.lists(
        st.tuples(st.sampled_from([*OPTION_OF, *IGNORED, "secrets.x", "resources.accelerator"]), _VALUES), max_size=5
    )
)
def test_any_values_resolve_or_are_refused(pairs: list[tuple[str, str]]) -> None:
    _resolves_or_is_refused("".join(nested(name, value) for name, value in pairs))


@given(st.text(alphabet=st.sampled_from("trt_llm:build -&*[]{}\n\t 'x\"|>!?%@")) | st.text())
def test_any_text_resolves_or_is_refused(text: str) -> None:
    _resolves_or_is_refused(text)
    _resolves_or_is_refused("trt_llm:\n" + text)


def _resolves_or_is_refused(text: str) -> None:
    try:
        config = from_text(text)
    except ConfigError as error:
        assert error.problems
        return
    assert set(config.origins) == set(OPTIONS)
    assert all(config.origin(name).line for name in config.user_set if config.origin(name).kind is OriginKind.FILE)
