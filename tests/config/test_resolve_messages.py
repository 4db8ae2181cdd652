"""What a resolution reports: values without effect, comments, quotes, retired and unknown names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from djl_trtllm.config import Layer, OriginKind, Setting, Source, load, parse_properties, read_arguments, resolve
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.config.rules.rule import Rule, Severity
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text, problems_of

PLACE = "(serving.properties:1)"


# -- values that do not count ------------------------------------------------------------------------------------------


def test_a_value_that_is_beaten_is_reported_once() -> None:
    config = from_text("option.max_input_len=256", {"OPTION_MAX_INPUT_LEN": "512"})
    assert config.warnings == (f"OPTION_MAX_INPUT_LEN=512 is overridden by option.max_input_len=256 {PLACE}",)


def test_a_beaten_value_that_says_the_same_is_not_reported() -> None:
    config = from_text("option.max_input_len=256", {"OPTION_MAX_INPUT_LEN": " 256 "})
    assert config.warnings == ()
    assert [setting.shown for setting in config.overridden["max_input_len"]] == ["OPTION_MAX_INPUT_LEN= 256 "]


def test_a_beaten_preset_is_neither_reported_nor_kept() -> None:
    preset = Setting("option.max_input_len", "9", Origin.derived("the presets of Truss"), "option.max_input_len")
    config = resolve([Source(Layer.PRESET, (preset,)), parse_properties("option.max_input_len=8", "f")])
    assert config.options.max_input_len == 8
    assert config.warnings == () and config.overridden == {}


def test_every_beaten_value_is_kept_the_strongest_first() -> None:
    environ = {"OPTION_MODEL_LOADING_TIMEOUT": "2", "MODEL_LOADING_TIMEOUT": "3", "SAGEMAKER_STARTUP_TIMEOUT": "1"}
    config = from_text("option.model_loading_timeout=4", environ)
    assert config.options.model_loading_timeout == 1
    beaten = [setting.value for setting in config.overridden["model_loading_timeout"]]
    assert beaten == ["4", "2", "3"] and len(config.warnings) == 3


def test_two_names_of_one_option_contradict_each_other_in_one_place() -> None:
    text = "option.enable_kv_cache_reuse=true\noption.enable_prefix_caching=false\n"
    assert problems_of(text) == (
        f"option.enable_kv_cache_reuse=true {PLACE} and option.enable_prefix_caching=false (serving.properties:2) "
        "are two names of one option with different values; keep one",
    )
    config = from_text(text.replace("false", "true "))
    assert config.options.enable_kv_cache_reuse is True and config.warnings == ()


def test_names_of_different_places_or_of_ordered_variables_do_not_contradict() -> None:
    config = from_text("option.enable_kv_cache_reuse=true", {"OPTION_ENABLE_PREFIX_CACHING": "false"})
    assert config.options.enable_kv_cache_reuse is True
    plain = Source(
        Layer.PLAIN,
        (
            Setting("option.enable_kv_cache_reuse", "true", Origin.environment("A"), "A"),
            Setting("option.enable_prefix_caching", "false", Origin.environment("B"), "B"),
        ),
    )
    assert resolve([plain]).options.enable_kv_cache_reuse is True


# -- the model that is served ------------------------------------------------------------------------------------------


def test_hf_model_id_names_the_only_model_that_is_served() -> None:
    config = from_text("option.model_id=a\noption.max_input_len=9", {"HF_MODEL_ID": "b", "OPTION_MODEL_ID": "c"})
    assert (config.options.model_id, config.options.max_input_len) == ("b", 9)
    assert config.warnings == (
        f"option.model_id=a {PLACE} is overridden by HF_MODEL_ID=b (environment): one model is served",
        "OPTION_MODEL_ID=c (environment) is overridden by HF_MODEL_ID=b (environment): one model is served",
    )


def test_the_same_model_by_two_names_is_one_model() -> None:
    config = from_text("option.model_id=a\noption.revision=v1", {"HF_MODEL_ID": "a ", "OPTION_MODEL_ID": "a"})
    assert config.warnings == () and config.options.revision == "v1"


def test_the_revision_of_another_model_does_not_become_that_of_hf_model_id() -> None:
    config = from_text("option.model_id=a\noption.revision=v1", {"HF_MODEL_ID": "b"})
    assert config.options.revision is None and not config.is_set("revision")
    assert "revision" not in config.overridden
    assert config.origin("revision").kind is OriginKind.DEFAULT
    assert config.warnings[1:] == (
        "option.revision=v1 (serving.properties:2) is ignored: it is a revision of option.model_id=a; "
        "set HF_REVISION for HF_MODEL_ID=b",
    )


@pytest.mark.parametrize(
    ("text", "environ", "arguments", "revision"),
    [
        ("option.model_id=a\noption.revision=v1", {"HF_MODEL_ID": "b", "HF_REVISION": "v2"}, (), "v2"),
        ("option.model_id=a\noption.revision=v1", {"HF_MODEL_ID": "b"}, ("revision=v3",), "v3"),
        ("option.model_id=a\noption.revision=v1", {"HF_REVISION": "v2"}, (), "v1"),
        ("option.revision=v1", {"HF_MODEL_ID": "b"}, (), "v1"),
        ("option.model_id=a\noption.revision=v1", {}, ("model_id=b",), "v1"),
        ("option.model_id=a\noption.revision=v1", {"OPTION_MODEL_ID": "b"}, (), "v1"),
    ],
)
def test_a_revision_that_is_of_the_model_counts(
    text: str, environ: dict[str, str], arguments: tuple[str, ...], revision: str, tmp_path: Path
) -> None:
    (tmp_path / "serving.properties").write_text(text)
    config = load(tmp_path, environ, arguments=arguments)
    assert config.options.revision == revision
    assert not any("it is a revision of" in warning for warning in config.warnings)


# -- how values are written --------------------------------------------------------------------------------------------


def test_a_comment_behind_a_value_is_left_off_and_reported() -> None:
    config = from_text("option.max_input_len=8 # most prompts are short")
    assert config.options.max_input_len == 8
    (warning,) = config.warnings
    assert warning.startswith(f"option.max_input_len=8 # most prompts are short {PLACE}: the comment behind the value")


def test_a_hash_in_a_text_is_part_of_it_and_reported() -> None:
    config = from_text("option.model_id=a/b # the model")
    assert config.options.model_id == "a/b # the model"
    assert config.warnings == (
        f"option.model_id=a/b # the model {PLACE}: the text from # on is part of the value; "
        "comments need their own line",
    )


def test_quotes_around_a_text_are_part_of_it_and_reported() -> None:
    config = from_text('option.model_id="a/b"')
    assert config.options.model_id == '"a/b"'
    assert config.warnings == (
        f'option.model_id="a/b" {PLACE}: the quotes are part of the value; write it without them',
    )
    assert from_text("option.model_id=a/b").warnings == ()


def test_quotes_around_a_list_belong_to_it() -> None:
    assert from_text('option.exclude_modules="a"').warnings == ()


def test_an_empty_value_counts_as_not_set_and_is_reported() -> None:
    config = from_text("option.max_input_len=\n", {"OPTION_MAX_OUTPUT_LEN": ""})
    assert config.options.max_input_len == 1024 and not config.is_set("max_input_len")
    assert config.warnings == (f"option.max_input_len= {PLACE} is empty: the option is not set",)


@pytest.mark.parametrize("name", ["API_KEY", "api_keys_file", "CERTIFICATE_FILE", "PRIVATE_KEY_FILE", "CLIENT_CA_FILE"])
def test_a_protection_that_is_empty_is_an_error(name: str) -> None:
    (problem,) = problems_of("", {f"SERVING_{name}": " "})
    assert problem.startswith(f"SERVING_{name} is empty, and the server would be open without it")


def test_a_wrong_value_is_reported_with_an_example_written_as_there(tmp_path: Path) -> None:
    (problem,) = problems_of("", {"SM_NUM_GPUS": "many"})
    assert problem.startswith("SM_NUM_GPUS=many (environment): expected a whole number")
    assert problem.endswith("; for example SM_NUM_GPUS=1")
    foreign = Setting("option.max_beam_width", "many", Origin.file("config.pbtxt", 3), "max_beam_width", alone=True)
    with pytest.raises(ConfigError) as caught:
        resolve([Source(Layer.FOREIGN, (foreign,))])
    assert caught.value.problems[0].endswith("; for example 1")


def test_all_problems_are_reported_at_once_with_the_warnings() -> None:
    with pytest.raises(ConfigError) as caught:
        from_text("option.max_input_len=x\noption.dtype=y\noption.nonsense=1", {"OPTION_BACKEND": "z"})
    assert len(caught.value.problems) == 3
    assert len(caught.value.warnings) == 1 and "option.nonsense" in caught.value.warnings[0]


def test_what_reading_reported_is_reported_again() -> None:
    source = Source(Layer.FILE, warnings=("a warning",), notes=("a note",), unknown=("an unknown",))
    config = resolve([source])
    assert (config.warnings, config.notes) == (("a warning", "an unknown"), ("a note",))
    with pytest.raises(ConfigError) as caught:
        resolve([Source(Layer.FILE, problems=("a problem",)), source])
    assert caught.value.problems == ("a problem",)


def test_a_preset_is_not_set_by_the_user() -> None:
    preset = Setting("option.max_input_len", "9", Origin.derived("the presets of Truss"), "option.max_input_len")
    config = resolve([Source(Layer.PRESET, (preset,))])
    assert config.options.max_input_len == 9 and not config.is_set("max_input_len")
    assert str(config.origin("max_input_len")) == "derived from the presets of Truss"


def test_a_rule_between_options_can_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule("r", ("port",), "never", Severity.ERROR, "no", "d", lambda context: context.formatted("port"))
    monkeypatch.setattr(import_module("djl_trtllm.config.resolve"), "OPTION_RULES", (rule,))
    assert problems_of("inference_port=1") == (f"inference_port=1 {PLACE}",)


def test_rules_are_reported_by_their_severity() -> None:
    assert "has no effect without" in from_text("option.smoothquant_alpha=0.5").warnings[0]
    both = from_text("option.max_tokens_in_paged_kv_cache=9\noption.free_gpu_memory_fraction=0.5")
    assert "holds the smaller of" in both.notes[0]


# -- retired and unknown names -----------------------------------------------------------------------------------------


def test_an_old_name_is_accepted_and_answered_with_what_it_did_and_what_replaces_it() -> None:
    retired = [declared for declared in OPTIONS.values() if declared.option.warn]
    assert len(retired) > 20
    config = from_text("\n".join(f"{declared.key}={declared.example}" for declared in retired))
    assert config.user_set == {declared.name for declared in retired}
    told = [warning for warning in config.warnings if "has no effect any more" in warning]
    assert told == [
        f"{declared.key}={declared.example} (serving.properties:{line}) has no effect any more "
        f"({declared.option.description[0].lower()}{declared.option.description[1:-1]}): {declared.option.legacy}"
        for line, declared in enumerate(retired, 1)
    ]


def test_a_wrong_value_of_an_old_name_is_an_error_and_nothing_else() -> None:
    with pytest.raises(ConfigError) as caught:
        from_text("option.baichuan_model_version=v9")
    (problem,) = caught.value.problems
    assert "one of v1_7b, v1_13b, v2_7b, v2_13b" in problem
    assert caught.value.warnings == ()


def test_an_unknown_key_is_reported_with_the_name_that_was_meant_as_it_is_written_there() -> None:
    environ = {"OPTION_MAX_IMPUT_LEN": "1", "OPTION_FROBNICATE": "1"}
    assert from_text("option.max_rolling_batchsize=8\nmax_num_tokens=8", environ).warnings == (
        "OPTION_FROBNICATE (environment) is not an option and has no effect; docs/options.md lists the options",
        "OPTION_MAX_IMPUT_LEN (environment) is not an option and has no effect; did you mean OPTION_MAX_INPUT_LEN?",
        f"option.max_rolling_batchsize {PLACE} is not an option and has no effect; did you mean "
        "option.max_rolling_batch_size?",
        "max_num_tokens (serving.properties:2) is not an option and has no effect; did you mean option.max_num_tokens?",
    )
    (warning,) = resolve([read_arguments(["max_imput_len=8"])]).warnings
    assert warning.endswith("did you mean option.max_input_len?")


def test_strict_makes_unknown_names_errors() -> None:
    source = Source(Layer.FOREIGN, unknown=("config.pbtxt has a name that is unknown",))
    with pytest.raises(ConfigError) as caught:
        resolve([source, parse_properties("option.strict=true\noption.nonsense=1", "f")])
    assert caught.value.problems[0] == "config.pbtxt has a name that is unknown"
    assert caught.value.problems[1].startswith("option.nonsense (f:2) is not an option")
    assert caught.value.warnings == ()


def test_the_value_of_an_unknown_key_is_not_shown() -> None:
    (warning,) = from_text("option.hub_tokne=hunter2").warnings
    assert "hunter2" not in warning


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("option.load_in_8bit=true", "option.quantize=int8"),
        ("option.load_in_4bit=true", "option.quantize=int4"),
        ("option.gpu_memory_utilization=0.9", "option.kv_cache_free_gpu_mem_fraction"),
        ("option.worker_path=/opt/worker", "the engine process starts its own ranks"),
        ("engine=DeepSpeed", "under DJL Serving write engine=Python"),
        ("engine=FasterTransformer", "option.backend chooses the engine"),
    ],
)
def test_an_old_name_is_reported_with_what_replaces_it(line: str, told: str) -> None:
    (warning,) = from_text(line).warnings
    assert warning.startswith(f"{line} (serving.properties:1)") and told in warning


def test_old_names_that_change_nothing_are_accepted() -> None:
    config = from_text("engine=MPI\noption.paged_attention=true\noption.rolling_batch=deepspeed")
    assert config.warnings == ()
    assert (config.options.paged_attention, config.options.rolling_batch) == (True, "deepspeed")


def test_the_address_of_a_model_by_its_first_name() -> None:
    assert from_text("option.s3url=s3://bucket/model").options.model_id == "s3://bucket/model"
