from __future__ import annotations

import re
from pathlib import Path

import javaproperties
import pytest
from hypothesis import given, strategies as st

from djl_trtllm.config import Origin, load
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.resolve import MAY_SET, WITHIN, listed
from djl_trtllm.config.sources import (
    IGNORED_VARIABLES,
    MASK,
    Layer,
    Setting,
    Source,
    as_arguments,
    is_secret_key,
    masked,
    parse_properties,
    read_arguments,
    read_properties,
    shortened,
    variables_of,
)
from djl_trtllm.errors import ConfigError
from tests.support.tables import by_rows, by_table

_texts = st.text(alphabet=st.sampled_from("ab=:#! \t\f\r\n\\u0041é.")) | st.text()


def lines_by_hand(text: str) -> dict[str, int]:
    """The line every key starts on, for files with one key per line."""
    return {line.split("=")[0]: number for number, line in enumerate(text.split("\n"), start=1) if "=" in line}


@given(_texts)
def test_keys_and_values_are_those_of_the_library(text: str) -> None:
    source = parse_properties(text, "f")
    try:
        expected = javaproperties.loads(text)
    except javaproperties.InvalidUEscapeError:
        assert len(source.problems) == 1
        return
    assert {setting.key: setting.value for setting in source.settings} == expected
    assert not source.problems


@given(st.lists(st.sampled_from(["", "# comment", "  ", "! more"]) | st.integers(0, 9).map(lambda n: f"k{n}=v{n}")))
def test_every_key_has_its_line(lines: list[str]) -> None:
    for end in ("\n", "\r\n", "\r"):
        source = parse_properties(end.join(lines), "f")
        assert {setting.key: setting.origin.line for setting in source.settings} == lines_by_hand("\n".join(lines))


def test_a_continued_value_has_the_line_it_starts_on_and_moves_the_next() -> None:
    source = parse_properties("# head\na = one \\\n   two\nb=3\n", "f")
    assert [(s.key, s.value, str(s.origin)) for s in source.settings] == [("a", "one two", "f:2"), ("b", "3", "f:4")]


def test_utf_8_is_read_with_or_without_a_mark_and_latin_1_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "serving.properties"
    for data in ("option.model_id=/é".encode(), "option.model_id=/é".encode("utf-8-sig"), b"option.model_id=/\xe9"):
        path.write_bytes(data)
        (setting,) = read_properties(path).settings
        assert (setting.key, setting.value) == ("option.model_id", "/é")


def test_a_nul_in_a_comment_or_behind_the_last_line_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "serving.properties"
    path.write_bytes(b"# a\0b\noption.backend=openvino\n#\0\0\0")
    source = read_properties(path)
    assert [(each.key, each.value) for each in source.settings] == [("option.backend", "openvino")]
    assert source.problems == ()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_file_in_utf_16_is_refused_and_not_read_as_other_names(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "serving.properties"
    path.write_text("option.backend=openvino\n", encoding=encoding)
    source = read_properties(path)
    (problem,) = source.problems
    assert source.settings == () and str(path) in problem and "UTF-8" in problem


def test_a_file_that_cannot_be_read_is_reported_with_the_reason(tmp_path: Path) -> None:
    problem = f"{tmp_path} cannot be read: it is a directory, expected a regular file"
    assert read_properties(tmp_path) == Source(Layer.FILE, problems=(problem,))
    assert read_properties(tmp_path / "nowhere") == Source(Layer.FILE)


def test_a_value_continues_on_a_bounded_number_of_lines() -> None:
    assert not parse_properties("a=" + "1,\\\n" * 200, "f").problems
    assert len(parse_properties("a=" + "1,\\\n" * 201, "f").problems) == 1


def test_what_stands_before_a_broken_escape_is_read_and_of_two_equal_keys_the_last() -> None:
    source = parse_properties("a=1\n\na=2\nb=\\u00", "f")
    assert [(setting.key, setting.value) for setting in source.settings] == [("a", "2")]
    (warning,), (problem,) = source.warnings, source.problems
    assert warning.startswith("f:1 and line 3: a is set twice")
    assert problem.startswith("f:4:") and "write a backslash as" in problem


def setting(value: str, key: str = "option.x", name: str = "X", given: str | None = None) -> Setting:
    return Setting(key, value, Origin.file("f", 3), name, given)


def test_a_setting_is_shown_as_the_user_wrote_it() -> None:
    assert setting("1").assignment == "X=1"
    assert setting("6291456", given="6").assignment == "X=6"
    assert setting("x" * 80).assignment == "X=" + "x" * 80
    assert setting("x" * 81).assignment == "X=" + "x" * 77 + "..."
    assert setting("a\tb").assignment == r"X=a\tb"


def test_a_secret_is_masked_by_the_key_or_by_the_name_that_the_user_wrote() -> None:
    assert setting("hunter2", key="option.hf_token").assignment == f"X={MASK}"
    assert setting("hunter2", name="HF_TOKEN").assignment == f"HF_TOKEN={MASK}"


def test_a_setting_is_cited_with_its_place() -> None:
    assert (setting("1").place, str(setting("1"))) == ("f:3", "X=1 (f:3)")
    variable = Setting("option.x", "1", Origin.environment("X"), "X")
    assert (variable.place, str(variable)) == ("environment", "X=1 (environment)")
    assert not variable.alone and variable.given is None


def test_users_write_options_by_name_in_files_on_the_command_line_and_in_option_variables() -> None:
    own = {layer for layer in Layer if layer.has_own_names}
    assert own == {Layer.ARGUMENTS, Layer.FILE, Layer.OPTION}


def test_an_argument_is_a_setting_of_the_command_line() -> None:
    source = read_arguments([" max_input_len =1=2", "option.nonsense=3"])
    assert source == Source(
        Layer.ARGUMENTS,
        (
            Setting("option.max_input_len", "1=2", Origin.override("command line"), "max_input_len"),
            Setting("option.nonsense", "3", Origin.override("command line"), "option.nonsense"),
        ),
    )


def test_an_argument_without_key_or_value_is_reported_and_set_nothing() -> None:
    source = read_arguments(["no value", "=3", " =4"])
    expected = "(command line): expected KEY=VALUE, such as max_input_len=2048"
    assert source.problems == tuple(f"{pair!r} {expected}" for pair in ("no value", "=3", " =4"))
    assert source.settings == ()
    assert "hunter2" not in read_arguments(["=HF_TOKEN=hunter2"]).problems[0]


@by_rows(
    ("origin", "text", "is_user", "is_preset"),
    [
        (Origin.file("serving.properties", 3), "serving.properties:3", True, False),
        (Origin.environment("HF_MODEL_ID"), "environment variable HF_MODEL_ID", True, False),
        (Origin.override("the presets of mine"), "the presets of mine", True, False),
        (Origin.default(), "default", False, False),
        (Origin.derived("option.max_num_tokens=5"), "derived from option.max_num_tokens=5", False, False),
        (Origin.preset("Truss"), "derived from the presets of Truss", False, True),
    ],
)
def test_an_origin_says_where_and_whether_a_person_set_it(
    origin: Origin, text: str, is_user: bool, is_preset: bool
) -> None:
    assert (str(origin), origin.is_user, origin.is_preset) == (text, is_user, is_preset)


def test_values_are_written_as_in_a_file() -> None:
    given = {"max_input_len": 5, "option.enable_lora": True, "inference_port": 81, "stop_in_engine": None}
    assert as_arguments(given) == ["max_input_len=5", "option.enable_lora=true", "inference_port=81"]


def test_what_is_no_option_or_the_caller_refuses_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as refused:
        as_arguments(
            {"max_input_length": 5, "zzz": 1, "max_input_len": 2},
            lambda name: f"{name}: not here" if name == "max_input_len" else None,
        )
    assert refused.value.problems == (
        "max_input_length is not an option; did you mean max_input_len?",
        "zzz is not an option; docs/options.md has the options there are",
        "max_input_len: not here",
    )


@by_table("environ", "field", "value")
def test_each_variable_sets_its_option(environ: dict[str, str], field: str, value: object) -> None:
    config = load(None, environ)
    found = getattr(config.options, field)
    assert (str(found) if isinstance(found, Path) else found) == value
    assert config.origin(field).where == next(iter(environ))
    assert config.warnings == ()


@pytest.mark.parametrize("text", ["six", "0", "-1", "1.5"])
def test_megabytes_that_are_no_number_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"SAGEMAKER_MAX_PAYLOAD_IN_MB={text}"):
        load(None, {"SAGEMAKER_MAX_PAYLOAD_IN_MB": text})


def test_zero_gpus_do_not_set_a_parallel_degree() -> None:
    config = load(None, {"SM_NUM_GPUS": "0"})
    assert config.options.tensor_parallel_degree == 1
    assert config.warnings == (
        "SM_NUM_GPUS=0 means that there is no GPU, and does not set option.tensor_parallel_degree",
    )
    assert load(None, {"SM_NUM_GPUS": " 0 "}).warnings != ()


def test_a_memory_fraction_meant_for_another_library_is_said() -> None:
    config = load(None, {"CUDA_MEMORY_FRACTION": "0.5", "SERVING_FEATURES": "VLLM"})
    assert config.options.kv_cache_free_gpu_mem_fraction is None
    assert config.warnings == (
        "CUDA_MEMORY_FRACTION=0.5 has no effect: with SERVING_FEATURES=vllm it configures another library; "
        "set OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION",
    )
    for features in ("trtllm", "vllm,TRTLLM"):
        config = load(None, {"CUDA_MEMORY_FRACTION": "0.5", "SERVING_FEATURES": features})
        assert config.options.kv_cache_free_gpu_mem_fraction == 0.5


def test_a_variable_may_mean_the_opposite_nothing_or_a_bare_key() -> None:
    for text, eager in (("true", False), ("TRUE", False), ("false", True), ("1", True)):
        assert load(None, {"ENABLE_CUDA_GRAPHS": text}).options.enforce_eager is eager
    assert vars(load(None, {"ARGS_BATCH_SIZE": "2"}).options)["batch_size"] == 2
    assert load(None, {"ARGS_MINWORKERS": "2", "ARGS_NO_OPTION": "x"}).warnings == ()
    assert load(None, {"MAX_BATCH_PREFILL_TOKENS": "9"}).options.max_num_batched_tokens == 9
    empty = load(None, {"OPTION_MAX_INPUT_LEN": "", "SERVING_JOB_QUEUE_SIZE": " ", "HF_MODEL_ID": ""})
    assert not empty.user_set and not empty.warnings
    sizes = {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6", "SAGEMAKER_MAX_REQUEST_SIZE": "9"}
    assert load(None, sizes).options.max_request_size == 9


def test_variables_of_the_container_are_answered_by_name() -> None:
    config = load(None, dict.fromkeys(IGNORED_VARIABLES, "x"))
    assert config.warnings == () and not config.user_set
    assert list(config.notes) == [f"{name} has no effect: {why}" for name, why in IGNORED_VARIABLES.items()]
    assert len(config.notes) > 15
    assert len(load(None, {"JAVA_OPTS": "-Xmx1g"}).notes) == 1


@by_table("key", "variables")
def test_the_variables_of_a_key_are_all_that_set_it_the_one_to_prefer_first(key: str, variables: list[str]) -> None:
    assert list(variables_of(key)) == variables


def test_a_translated_value_is_shown_as_it_was_written() -> None:
    megabytes = load(None, {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6", "SERVING_MAX_REQUEST_SIZE": "9"})
    assert megabytes.warnings == (
        "SERVING_MAX_REQUEST_SIZE=9 is overridden by SAGEMAKER_MAX_PAYLOAD_IN_MB=6 (environment)",
    )
    graphs = load(None, {"ENABLE_CUDA_GRAPHS": "yes", "OPTION_ENFORCE_EAGER": "false"})
    assert any(line.startswith("ENABLE_CUDA_GRAPHS=yes is overridden") for line in graphs.warnings)


def test_every_option_can_be_set_by_its_first_variable() -> None:
    variables = {name: variables_of(declared.key)[0] for name, declared in OPTIONS.items()}
    assert len(set(variables.values())) == len(OPTIONS)
    set_by = {name: load(None, {variables[name]: declared.example}).user_set for name, declared in OPTIONS.items()}
    assert set_by == {name: {name} for name in OPTIONS}


# -- secrets, and long texts -------------------------------------------------------------------------------------------


@by_table("key", "value", "shown")
def test_values_are_masked_as_far_as_they_are_secret(key: str, value: str, shown: str) -> None:
    assert masked(key, value) == shown


def test_secrets_are_known_by_the_end_of_a_name() -> None:
    secret = "HF_TOKEN option.hf_token AWS_SECRET_ACCESS_KEY db.password API_KEY apikey credential secret"
    assert [key for key in secret.split() if not is_secret_key(key)] == []
    plain = "max_num_tokens time_per_token adapter_token token_count keystore compass monkey"
    assert [key for key in plain.split() if is_secret_key(key)] == []


def test_a_long_text_is_cut_when_it_can_be_printed() -> None:
    texts = {
        "12345": "12345",
        "123456": "12...",
        "x" * 10**6: "xx...",
        "1\n2": "1\\n2",
        "\n\n\n": "\\n...",
        "\u202e": "\\u...",
    }
    assert {text: shortened(text, 5) for text in texts} == texts


def test_the_secret_options_are_known() -> None:
    secret = {declared.name for declared in OPTIONS.values() if any(map(is_secret_key, declared.spellings))}
    assert secret == {"hf_access_token", "keystore_pass", "api_key"}


PAGE = Path(__file__).parents[2] / "docs" / "fetched-models.md"

OF_THE_OPERATOR = {
    "hf_access_token", "engine_cache_dir", "engine_cache_max_gb", "engine_cache", "engine_cache_wait",
    "input_timing_cache", "output_timing_cache", "visualize_network", "calib_dataset", "lora_dir", "sessions_path",
    "enable_stateful_sessions", "sessions_expiration", "max_sessions", "executor_memory_limit",
    "executor_max_requests", "chat_template_timeout", "workspace",
    "extra_llm_api_options", "extra_engine_args", "speculative_config", "compilation_config", "hf_overrides",
    "kv_transfer_config", "limit_mm_per_prompt", "allowed_media_domains", "stored_responses_timeout",
    "stored_responses_memory",
}  # fmt: skip
"""Options of a model that are no business of its repository: files, addresses, secrets and limits of this machine."""


def test_every_option_of_a_model_is_on_one_of_the_lists() -> None:
    of_models = {name for name, each in OPTIONS.items() if each.option.scope is Scope.MODEL and not each.option.legacy}
    assert of_models == MAY_SET | WITHIN | OF_THE_OPERATOR
    assert not (MAY_SET | WITHIN) & OF_THE_OPERATOR


def test_no_listed_option_is_the_servers_or_a_permission_and_none_is_a_path() -> None:
    listed_options = [OPTIONS[name] for name in MAY_SET]
    assert {each.option.scope for each in listed_options} == {Scope.MODEL}
    assert [each.name for each in listed_options if each.type.base is Path] == []


def test_the_page_has_the_list() -> None:
    assert re.findall(r"^- `([\w.]+)`$", PAGE.read_text(), re.MULTILINE) == listed()


@by_table("line")
def test_what_is_not_listed_is_ignored_by_name(tmp_path: Path, line: str) -> None:
    (tmp_path / "serving.properties").write_text(f"{line}\noption.max_input_len=77\n")
    config = load(tmp_path, {}, fetched="acme/story")
    key = line.partition("=")[0]
    (warning,) = [warning for warning in config.warnings if "was fetched" in warning]
    assert warning.startswith(f"{line} (")
    assert "acme/story was fetched" in warning and "docs/fetched-models.md" in warning
    name = next(name for name, each in OPTIONS.items() if key in each.spellings)
    assert config.options.max_input_len == 77
    assert getattr(config.options, name) == getattr(load(None, {}).options, name)


def test_what_may_be_an_argument_of_the_engine_is_ignored_by_name(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.rolling_batch=vllm\noption.worker_cls=theirs.Own\n")
    config = load(tmp_path, {}, fetched="acme/story")
    (warning,) = config.warnings
    assert "acme/story was fetched" in warning and "OPTION_WORKER_CLS" in warning
    assert config.engine_settings == ()
    assert [each.key for each in load(tmp_path, {}).engine_settings] == ["option.worker_cls"]


@pytest.mark.parametrize("line", ["option.model_id=weights", "option.model_id=acme/other", "option.dtype=fp16"])
def test_what_is_listed_counts(tmp_path: Path, line: str) -> None:
    (tmp_path / "serving.properties").write_text(f"{line}\n")
    config = load(tmp_path, {}, fetched="acme/story")
    assert not any("was fetched" in warning for warning in config.warnings)
    assert config.user_set


def test_the_operator_may_set_everything(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.engine_cache_dir=/etc\n")
    config = load(tmp_path, {"OPTION_ENGINE_CACHE_DIR": str(tmp_path)}, fetched="acme/story")
    assert config.options.engine_cache_dir == tmp_path


def test_the_configuration_of_a_model_that_a_fetched_one_names_is_bounded_too(tmp_path: Path) -> None:
    """`load` reads a second source, the repository that `option.model_id` names; it is no more trusted."""
    engine = tmp_path / "engine" / "tensorrt_llm"
    engine.mkdir(parents=True)
    (tmp_path / "serving.properties").write_text("option.model_id=engine\n")
    lora = 'parameters { key: "lora_prefetch_dir" value: { string_value: "/etc" } }'
    stolen = 'parameters { key: "tokenizer_dir" value: { string_value: "/etc/secrets" } }'
    (engine / "config.pbtxt").write_text(f"max_batch_size: 7\n{stolen}\n{lora}\n")
    config = load(tmp_path, {}, fetched="acme/story")
    assert (config.options.max_rolling_batch_size, config.options.tokenizer) == (7, None)
    (warning,) = [warning for warning in config.warnings if "was fetched" in warning]
    assert warning.startswith("tokenizer_dir=/etc/secrets (") and "acme/story was fetched" in warning
    assert load(tmp_path, {}).options.tokenizer == "/etc/secrets"
