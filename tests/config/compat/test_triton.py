from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.config import Config, OriginKind, parse_properties, resolve
from djl_trtllm.config.compat import triton
from djl_trtllm.config.compat.triton_names import EXAMPLES, IGNORED, MODELS, OPTION_OF, TO_FILL
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.errors import ConfigError


def from_text(text: str, path: str = "tensorrt_llm/config.pbtxt") -> Config:
    return resolve([triton.parse_config(text, path), triton.triton_presets()])


def problems_of(text: str, path: str = "tensorrt_llm/config.pbtxt") -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        from_text(text, path)
    return caught.value.problems


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def repository(root: Path, **files: str) -> Path:
    for model, text in files.items():
        (root / model).mkdir(parents=True)
        (root / model / "config.pbtxt").write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("max_batch_size: 128", "max_rolling_batch_size", 128),
        ("dynamic_batching { default_queue_policy: { max_queue_size: 64 } }", "job_queue_size", 64),
        (parameter("batch_scheduler_policy", "max_utilization"), "batch_scheduler_policy", "max_utilization"),
        (parameter("batch_scheduler_policy", "guaranteed_completion"), "batch_scheduler_policy", "guaranteed_no_evict"),
        (parameter("kv_cache_free_gpu_mem_fraction", "0.5"), "kv_cache_free_gpu_mem_fraction", 0.5),
        (parameter("max_tokens_in_paged_kv_cache", "2560"), "max_tokens_in_paged_kv_cache", 2560),
        (parameter("enable_kv_cache_reuse", "True"), "enable_kv_cache_reuse", True),
        (parameter("enable_chunked_context", "true"), "enable_chunked_prefill", True),
        (parameter("max_beam_width", "1"), "max_beam_width", 1),
        (parameter("tokenizer_dir", "/models/llama"), "tokenizer", "/models/llama"),
        (parameter("gpt_model_path", "/engines/llama"), "model_id", "/engines/llama"),
    ],
)
def test_a_value_becomes_its_option_and_keeps_its_line(text: str, name: str, value: object) -> None:
    config = from_text("\n" + text)
    assert getattr(config.options, name) == value
    assert str(config.origin(name)) == "tensorrt_llm/config.pbtxt:2"
    assert config.is_set(name)


def test_the_engine_inside_the_repository_is_no_model_elsewhere() -> None:
    for path in ("/packages/inflight_batcher_llm/tensorrt_llm/1/", "tensorrt_llm/1", "/repo/tensorrt_llm/2"):
        assert from_text(parameter("gpt_model_path", path)).options.model_id is None


def test_what_is_not_filled_in_counts_as_not_set_and_is_reported_once() -> None:
    config = from_text(
        parameter("max_beam_width", "${max_beam_width}") + parameter("decoding_mode", "${decoding_mode}")
    )
    assert not config.is_set("max_beam_width")
    (warning,) = config.warnings
    assert "not filled in" in warning and "max_beam_width (line 1), decoding_mode (line 2)" in warning


def test_what_the_workflow_tells_its_reader_to_fill_in_is_an_error() -> None:
    fields = {
        "max_batch_size": "max_batch_size: ${triton_max_batch_size}",
        "decoupled": "model_transaction_policy { decoupled: ${decoupled_mode} }",
    }
    told = 0
    for model in MODELS:
        for name in sorted(TO_FILL[model]):
            (problem,) = problems_of(fields.get(name, parameter(name, "${x}")), f"{model}/config.pbtxt")
            assert problem.startswith(f"{name}=${{")
            assert f"({model}/config.pbtxt:1): this is not filled in" in problem
            assert problem.endswith(f"for example {EXAMPLES[name]}")
            told += 1
    assert told >= 12


def test_an_empty_text_counts_as_not_set() -> None:
    config = from_text(parameter("max_tokens_in_paged_kv_cache", ""))
    assert config.options.max_tokens_in_paged_kv_cache is None
    assert "is empty" in config.warnings[0]


def test_a_parameter_without_effect_is_answered_by_name() -> None:
    names = [name for name in IGNORED if "." not in name and name != "preferred_batch_size"]
    config = from_text("".join(parameter(name, "7") for name in names))
    place = "tensorrt_llm/config.pbtxt"
    expected = [f"{place}: {name}=7 (line {line}): {IGNORED[name]}" for line, name in enumerate(names, 1)]
    assert list(config.notes) == expected and len(names) >= 3
    assert config.warnings == ()


def test_a_misspelt_name_gets_a_suggestion() -> None:
    (warning,) = from_text(parameter("kv_cache_free_gpu_memory_fraction", "0.5")).warnings
    assert "did you mean kv_cache_free_gpu_mem_fraction?" in warning


def test_strict_makes_a_misspelt_name_an_error() -> None:
    source = triton.parse_config(parameter("max_beem_width", "1"), "config.pbtxt")
    with pytest.raises(ConfigError, match="max_beem_width"):
        resolve([source, parse_properties("option.strict=true", "serving.properties")])


def test_the_template_as_it_is_says_nothing_but_what_was_set() -> None:
    text = """
        name: "tensorrt_llm" backend: "tensorrtllm" max_batch_size: 8
        dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 0 }
        input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
        instance_group [ { count: 1 kind: KIND_CPU } ]
    """
    config = from_text(text)
    assert config.warnings == () and config.notes == ()


def test_instances_and_schedulers_of_triton_are_answered() -> None:
    config = from_text("instance_group [ { count: 4 gpus: [ 0 ] } ]\noptimization { graph { level: 1 } }")
    text = "\n".join(config.notes)
    assert "instance_group.count=4" in text and "CUDA_VISIBLE_DEVICES" in text and "optimization (line 2)" in text


def test_the_engines_model_counts_before_the_others(tmp_path: Path) -> None:
    root = repository(tmp_path, ensemble="max_batch_size: 1", tensorrt_llm="max_batch_size: 64")
    config = resolve(triton.read_repository(triton.repository_files(root)))
    assert config.options.max_rolling_batch_size == 64
    assert any("max_batch_size=1 is overridden" in warning for warning in config.warnings)


def test_a_repository_without_the_engines_model_is_refused(tmp_path: Path) -> None:
    root = repository(tmp_path, ensemble="max_batch_size: 1", preprocessing="max_batch_size: 1")
    with pytest.raises(ConfigError, match=r"has no tensorrt_llm/config\.pbtxt"):
        resolve(triton.read_repository(triton.repository_files(root)))


def test_what_triton_presets_comes_with_a_repository_and_not_with_lmis(tmp_path: Path) -> None:
    root = repository(tmp_path / "triton", ensemble="max_batch_size: 8", tensorrt_llm="max_batch_size: 8")
    config = resolve(triton.read_repository(triton.repository_files(root)))
    assert config.options.batch_scheduler_policy == "guaranteed_no_evict"
    assert config.origin("batch_scheduler_policy").kind is OriginKind.DERIVED
    assert not config.is_set("batch_scheduler_policy")
    root = repository(tmp_path / "lmi", tensorrt_llm="max_batch_size: 8")
    config = resolve(triton.read_repository(triton.repository_files(root)))
    assert config.options.batch_scheduler_policy == OPTIONS["batch_scheduler_policy"].default


_NAMES = st.sampled_from([*OPTION_OF, *IGNORED, "gpt_model_path", "nonsense"])
_VALUES = st.text(max_size=10) | st.sampled_from(["", "${x}", "true", "0", "256", "0.9", "max_utilization", "v1"])


@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=6))
def test_any_parameters_resolve_or_are_refused(pairs: list[tuple[str, str]]) -> None:
    text = "".join(
        f"parameters {{ key: {_quoted(key)} value: {{ string_value: {_quoted(value)} }} }}\n" for key, value in pairs
    )
    _resolves_or_is_refused(text)


@given(st.text(alphabet=st.sampled_from('max_batch_size:{}[]<>",;\n# 1${}parameters key value')) | st.text())
def test_any_text_resolves_or_is_refused(text: str) -> None:
    _resolves_or_is_refused(text)


def _quoted(text: str) -> str:
    return '"' + "".join(f"\\{byte:03o}" for byte in text.encode("utf-8", "surrogatepass")) + '"'


def _resolves_or_is_refused(text: str) -> None:
    try:
        config = from_text(text)
    except ConfigError as error:
        assert error.problems
        return
    assert set(config.origins) == set(OPTIONS)
    assert all(config.origin(name).line for name in config.user_set if config.origin(name).kind is OriginKind.FILE)
