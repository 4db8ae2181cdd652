from __future__ import annotations

import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from djl_trtllm.config import Backend, Config, Options, load, rules
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.choices import SchedulerPolicy
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.resolve import precedence, resolve
from djl_trtllm.config.rules import RULES, RuleContext, Severity, When, check_model, check_running
from djl_trtllm.config.sources import (
    IGNORED_VARIABLES,
    MASK,
    Layer,
    Origin,
    OriginKind,
    Setting,
    Source,
    parse_properties,
    read_arguments,
    read_environment,
    variables_of,
)
from djl_trtllm.config.speculation import Speculation, speculation_of
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text, problems_of
from tests.support.tables import by_rows, by_table, table


@pytest.mark.parametrize(
    ("scope", "key", "field"),
    [(Scope.MODEL, "option.max_input_len", "max_input_len"), (Scope.SERVER, "inference_port", "port")],
)
def test_each_layer_overrides_those_after_it(scope: Scope, key: str, field: str) -> None:
    """Take away the highest layer again and again: the next one counts, and cites those below it."""
    order = precedence(scope)
    origin = Origin.file("f", 1)
    sources = [Source(layer, (Setting(key, str(100 + rank), origin, key),)) for rank, layer in enumerate(order)]
    for rank in range(len(order)):
        config = resolve(reversed(sources[rank:]))
        assert getattr(config.options, field) == 100 + rank
        assert [each.value for each in config.overridden.get(field, ())] == [
            str(100 + lower) for lower in range(rank + 1, len(order))
        ]
        assert len(config.warnings) == len(order) - rank - 1
    assert resolve([]).overridden == {} and resolve([]).user_set == frozenset()


def test_the_precedence_table_in_the_docstring_is_the_function() -> None:
    words = {
        Layer.ARGUMENTS: "command line",
        Layer.SAGEMAKER: "SageMaker variables",
        Layer.NAMED_MODEL: "HF_MODEL_ID and HF_REVISION",
        Layer.FILE: "serving.properties",
        Layer.OPTION: "OPTION_* variables",
        Layer.SERVING: "SERVING_* variables",
        Layer.PLAIN: "plain variables",
        Layer.TRANSLATED: "variables of other servers",
        Layer.FOREIGN: "config.pbtxt, config.yaml",
        Layer.PRESET: "presets of Triton and Truss",
    }
    rows = [re.split(r"\s{2,}", line.strip()) for line in (precedence.__doc__ or "").splitlines()]
    ranked = [row for row in rows if row[0].isdigit()]
    for column, scope in ((1, Scope.MODEL), (2, Scope.SERVER), (3, Scope.OPERATOR)):
        cells = [row[column] for row in ranked if len(row) > column]
        assert cells == [words[layer] for layer in precedence(scope)]


@pytest.mark.parametrize("variable", ["OPTION_TRUST_REMOTE_CODE", "HF_MODEL_TRUST_REMOTE_CODE"])
def test_the_operator_takes_back_what_a_model_allows_itself(tmp_path: Path, variable: str) -> None:
    (tmp_path / "serving.properties").write_text("option.trust_remote_code=true\n")
    assert load(tmp_path, {}).options.trust_remote_code
    config = load(tmp_path, {variable: "false"})
    assert not config.options.trust_remote_code
    assert variable in str(config.origin("trust_remote_code"))
    assert any("option.trust_remote_code=true" in warning for warning in config.warnings)


def test_files_of_a_model_come_last_for_permissions() -> None:
    order = precedence(Scope.PERMISSION)
    assert order[-3:] == (Layer.FILE, Layer.FOREIGN, Layer.PRESET)
    assert set(order) == set(precedence(Scope.MODEL))


def test_the_environment_a_command_line_and_a_directory_are_read(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_input_len=1\n")
    config = load(tmp_path, {"OPTION_MAX_OUTPUT_LEN": "2"}, arguments=["max_seq_len=3"])
    options = config.options
    assert (options.max_input_len, options.max_output_len, options.max_seq_len) == (1, 2, 3)
    assert config.model_dir == tmp_path


def test_a_configuration_file_stands_for_its_directory(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_input_len=1\n")
    assert load(tmp_path / "serving.properties", {}) == load(tmp_path, {})


def test_the_repository_that_model_id_names_counts_last_of_its_layer(tmp_path: Path) -> None:
    for name, length in (("here", 1), ("there", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f"name: 'tensorrt_llm' max_batch_size: {length}\n")
    (tmp_path / "there" / "serving.properties").write_text("option.max_input_len=3\n")
    config = load(tmp_path / "here", {"OPTION_MODEL_ID": "../there"})
    assert config.model_dir == tmp_path / "here"
    assert config.options.max_rolling_batch_size == 1
    assert config.options.max_input_len == 1024
    (tmp_path / "here" / "config.pbtxt").unlink()
    config = load(tmp_path / "here", {"OPTION_MODEL_ID": "../there"})
    assert config.model_dir == tmp_path / "here"
    assert config.options.max_rolling_batch_size == 2
    assert load(None, {"OPTION_MODEL_ID": str(tmp_path / "there")}).options.max_rolling_batch_size == 2


@pytest.mark.parametrize("key", ["install_requirements", "option.install_requirements"])
def test_only_the_operators_variable_can_install_requirements(key: str) -> None:
    for value in ("true", "false"):
        assert "SERVING_INSTALL_REQUIREMENTS" in problems_of(f"{key}={value}")[0]
    assert "SERVING_INSTALL_REQUIREMENTS" in problems_of("", {"OPTION_INSTALL_REQUIREMENTS": "true"})[0]
    assert from_text("", {"SERVING_INSTALL_REQUIREMENTS": "true"}).options.install_requirements is True


PLACE = "(serving.properties:1)"


# -- What a resolution reports: values without effect, comments, quotes, retired and unknown names --


@by_table("text", "environ", "warnings")
def test_a_value_without_effect_is_reported_once(text: str, environ: dict[str, str], warnings: list[str]) -> None:
    found = from_text(f"option.{text}", environ).warnings
    assert len(found) == len(warnings)
    for line, pattern in zip(found, warnings, strict=True):
        assert re.fullmatch(pattern.replace(" P", " " + re.escape(PLACE)), line)


def test_a_value_is_used_as_the_warning_says() -> None:
    for text, name, value in (
        ("max_input_len=8 # short", "max_input_len", 8),
        ("model_id=a/b # the model", "model_id", "a/b # the model"),
        ('model_id="a/b"', "model_id", '"a/b"'),
        ("max_input_len=", "max_input_len", 1024),
    ):
        assert getattr(from_text(f"option.{text}").options, name) == value
    assert not from_text("option.max_input_len=").is_set("max_input_len")
    same = from_text("option.model_id=a\noption.revision=v1", {"HF_MODEL_ID": "a ", "OPTION_MODEL_ID": "a"})
    assert same.options.revision == "v1"
    equal = from_text("option.max_input_len=256", {"OPTION_MAX_INPUT_LEN": " 256 "})
    assert [setting.assignment for setting in equal.overridden["max_input_len"]] == ["OPTION_MAX_INPUT_LEN= 256 "]


def test_a_preset_is_nobodys_and_is_neither_reported_nor_kept_when_it_is_overridden() -> None:
    preset = Setting("option.max_input_len", "9", Origin.preset("Truss"), "option.max_input_len")
    alone = resolve([Source(Layer.PRESET, (preset,))])
    assert alone.options.max_input_len == 9 and not alone.is_set("max_input_len")
    config = resolve([Source(Layer.PRESET, (preset,)), parse_properties("option.max_input_len=8", "f")])
    assert config.options.max_input_len == 8
    assert config.warnings == () and config.overridden == {}


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


def test_the_revision_of_another_model_does_not_become_that_of_hf_model_id() -> None:
    config = from_text("option.model_id=a\noption.revision=v1", {"HF_MODEL_ID": "b"})
    assert config.options.revision is None and not config.is_set("revision")
    assert "revision" not in config.overridden
    assert config.origin("revision").kind is OriginKind.DEFAULT
    assert config.warnings[1:] == (
        "option.revision=v1 (serving.properties:2) is ignored: it is a revision of option.model_id=a; "
        "set HF_REVISION for HF_MODEL_ID=b",
    )


@by_table("revision", "environ", "arguments")
def test_a_revision_that_is_of_the_model_counts(
    tmp_path: Path, revision: str, environ: dict[str, str], arguments: tuple[str, ...]
) -> None:
    (tmp_path / "serving.properties").write_text("option.model_id=a\noption.revision=v1")
    config = load(tmp_path, environ, arguments=arguments)
    assert config.options.revision == revision
    assert not any("it is a revision of" in warning for warning in config.warnings)
    assert from_text("option.revision=v1", {"HF_MODEL_ID": "b"}).options.revision == "v1"


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


def test_an_old_name_is_accepted_and_answered_with_what_it_did_and_what_replaces_it() -> None:
    retired = [declared for declared in OPTIONS.values() if declared.option.warn]
    assert len(retired) > 20
    config = from_text("\n".join(f"{declared.key}={declared.example}" for declared in retired))
    assert config.user_set == {declared.name for declared in retired}
    told = [warning for warning in config.warnings if "has no effect any more" in warning]
    for line, (declared, warning) in enumerate(zip(retired, told, strict=True), 1):
        assert warning.startswith(f"{declared.key}={declared.example} (serving.properties:{line})")
        assert declared.option.description[1:-1] in warning and warning.endswith(f": {declared.option.legacy}")


def test_an_unknown_key_is_reported_without_its_value_with_the_name_that_was_meant_as_it_is_written_there() -> None:
    environ = {"OPTION_MAX_IMPUT_LEN": "hunter2", "OPTION_FROBNICATE": "1"}
    warnings = from_text("option.max_rolling_batchsize=8\nmax_num_tokens=8\n=3", environ).warnings
    assert [(line.split()[0], line.rpartition("; ")[2]) for line in warnings] == [
        ("OPTION_FROBNICATE", "docs/options.md lists the options"),
        ("OPTION_MAX_IMPUT_LEN", "did you mean OPTION_MAX_INPUT_LEN?"),
        ("option.max_rolling_batchsize", "did you mean option.max_rolling_batch_size?"),
        ("max_num_tokens", "did you mean option.max_num_tokens?"),
        ("an", "docs/options.md lists the options"),
    ]
    assert warnings[4].startswith("an empty key (") and PLACE in warnings[2] and "hunter2" not in warnings[1]
    (warning,) = resolve([read_arguments(["max_imput_len=8"])]).warnings
    assert warning.endswith("did you mean option.max_input_len?")


def test_strict_makes_unknown_names_errors() -> None:
    source = Source(Layer.FOREIGN, unknown=("config.pbtxt has a name that is unknown",))
    with pytest.raises(ConfigError) as caught:
        resolve([source, parse_properties("option.strict=true\noption.nonsense=1", "f")])
    assert caught.value.problems[0] == "config.pbtxt has a name that is unknown"
    assert caught.value.problems[1].startswith("option.nonsense (f:2) is not an option")
    assert caught.value.warnings == ()


@given(
    tokens=st.integers(1, 10**6),
    own_input=st.none() | st.integers(1, 10**5),
    own_output=st.none() | st.integers(1, 10**5),
    own_batch=st.none() | st.integers(1, 2000),
)
def test_widening_is_the_documents_formula(
    tokens: int, own_input: int | None, own_output: int | None, own_batch: int | None
) -> None:
    lines = [f"option.max_num_tokens={tokens}"]
    lines += [f"option.max_input_len={own_input}"] * (own_input is not None)
    lines += [f"option.max_output_len={own_output}"] * (own_output is not None)
    lines += [f"option.max_rolling_batch_size={own_batch}"] * (own_batch is not None)
    options = from_text("\n".join(lines)).options
    assert options.max_input_len == max(min(4096, tokens), own_input or 0)
    assert options.max_output_len == max(min(4096, tokens), own_output or 0)
    assert options.max_rolling_batch_size == max(256, own_batch or 0)


@pytest.mark.parametrize("tokens", ["", "option.max_num_tokens=5000\n"])
def test_max_batch_size_is_the_batch_in_engine_and_server(tokens: str) -> None:
    config = from_text(f"{tokens}option.max_batch_size=64")
    assert (config.options.max_num_sequences, config.options.max_rolling_batch_size) == (64, 64)
    cause = f"option.max_batch_size=64 (serving.properties:{2 if tokens else 1})"
    assert str(config.origin("max_rolling_batch_size")) == f"derived from {cause}"
    assert from_text("", {"OPTION_MAX_BATCH_SIZE": "64"}).options.max_rolling_batch_size == 64
    assert from_text("option.max_batch_size=64\noption.max_rolling_batch_size=16").options.max_rolling_batch_size == 16
    assert from_text("option.max_num_sequences=64").options.max_rolling_batch_size == 32


def test_a_value_at_the_limit_is_left_alone_and_one_that_is_raised_is_reported_with_both() -> None:
    config = from_text("option.max_num_tokens=5000\noption.max_input_len=4096\noption.max_rolling_batch_size=256")
    assert config.warnings == ()
    assert str(config.origin("max_input_len")) == "serving.properties:2"
    assert str(config.origin("max_output_len")) == "derived from option.max_num_tokens=5000 (serving.properties:1)"
    config = from_text("option.max_num_tokens=5000\noption.max_rolling_batch_size=8")
    (warning,) = config.warnings
    assert warning.startswith("option.max_rolling_batch_size=8 (serving.properties:2) is raised to 256, because ")
    assert "option.max_num_tokens=5000 (serving.properties:1)" in warning
    assert warning.endswith("leave option.max_num_tokens out")
    assert str(config.origin("max_rolling_batch_size")) == (
        "derived from option.max_num_tokens=5000 (serving.properties:1), which raises 8 (serving.properties:2)"
    )


@by_table("text", "environ", "host", "port")
def test_an_address_is_split_into_host_and_port(text: str, environ: dict[str, str], host: str, port: int) -> None:
    config = from_text(text, environ)
    assert (config.options.host, config.options.port) == (host, port)
    assert str(config.origin("host")) == str(config.origin("port")) == f"derived from {text} (serving.properties:1)"
    managed = from_text(text.replace("inference", "management"), environ).options
    assert (managed.management_host, managed.management_port, managed.port) == (host, port, 8080)


def test_host_and_port_of_their_own_count_before_the_address() -> None:
    config = from_text("inference_address=http://127.0.0.1:9000\ninference_host=localhost\ninference_port=7")
    assert (config.options.host, config.options.port) == ("localhost", 7)
    assert str(config.origin("host")) == "serving.properties:2"


def test_an_address_of_another_form_is_refused() -> None:
    wrong = (
        "0.0.0.0:8080",
        "ftp://host:1",
        "http://:8080",
        "http://user@host:1",
        "http://host:1/path",
        "http://host:1?a=b",
        "http://host:99999",
        "http://[::1",
    )
    for address in wrong:
        told = f"inference_address={address.replace('user', MASK)} (serving.properties:1): expected http://HOST:PORT"
        assert problems_of(f"inference_address={address}") == (told,)
    (problem,) = problems_of("inference_address=https://host:1")
    assert problem.endswith("http://HOST:PORT; for TLS set certificate_file and private_key_file")


def test_with_a_certificate_an_address_is_one_of_https() -> None:
    (problem,) = problems_of("inference_address=http://host:1", {"SERVING_CERTIFICATE_FILE": "/c.pem"})
    assert problem.endswith("expected https://HOST:PORT, because certificate_file and private_key_file are set")


def test_a_management_address_that_is_that_of_the_requests_is_no_port_of_its_own() -> None:
    both = "inference_address=http://127.0.0.1:8080\nmanagement_address=http://127.0.0.1:8080"
    assert from_text(both).options.management_port == 0
    assert from_text("management_address=http://0.0.0.0:8080").options.management_port == 0
    assert from_text("management_address=http://127.0.0.1:8080").options.management_port == 8080
    assert from_text(both, {"SERVING_MANAGEMENT_PORT": "8080"}).options.management_port == 8080


def test_the_engine_cache_follows_djls_folders() -> None:
    folders = {"DJL_CACHE_DIR": "/c", "SERVING_DOWNLOAD_DIR": "/d"}
    for variable, folder in folders.copy().items():
        config = from_text("", folders)
        assert config.options.engine_cache_dir == Path(folder) / "djl-trtllm"
        assert str(config.origin("engine_cache_dir")) == f"derived from {variable}={folder} (environment)"
        del folders[variable]
    config = from_text("option.engine_cache_dir=/e", {"DJL_CACHE_DIR": "/c"})
    assert config.options.engine_cache_dir == Path("/e") and config.is_set("engine_cache_dir")
    assert from_text("").options.engine_cache_dir is None


KEYS = tuple(spelling for declared in OPTIONS.values() for spelling in declared.spellings)
VARIABLES = (
    *dict.fromkeys(name for declared in OPTIONS.values() for name in variables_of(declared.key)),
    *IGNORED_VARIABLES,
)
MODEL_TYPES = (None, "llama", "mistral", "qwen2", "gptj", "chatglm", "baichuan", "", "\0", "falcon")
_WORDS = """true false none max auto 0 1 -1 0.5 1.0 1e5 nan inf 4096 99999999999999999999 1,2,3 [ ["a"] [[1]] [true]
a,,b , "4" K=V,K2=V2 http://[::1 https://u:p@h/x s3://b/k ~nobody é {} %s [red]"""
WORDS = (*_WORDS.split(), "8 # comment", "[1, 2]", "", " ", "\0", "\ud800", "\u2028")
_nasty = st.sampled_from(WORDS) | st.text(max_size=12) | st.integers(-10, 10**9).map(str) | st.floats().map(str)
_lines = st.lists(st.tuples(st.sampled_from(KEYS) | st.text(max_size=12), _nasty).map("=".join), max_size=6)
_variables = st.dictionaries(st.sampled_from(VARIABLES) | st.text(min_size=1, max_size=12), _nasty, max_size=6)


@given(_lines, _variables, st.lists(st.text(max_size=20), max_size=2), st.sampled_from(MODEL_TYPES))
def test_any_file_and_environment_resolve_or_are_refused(
    lines: list[str], environ: dict[str, str], arguments: list[str], model_type: str | None
) -> None:
    text = "\n".join(lines)
    sources: list[Source] = [*read_environment(environ), parse_properties(text, "f"), read_arguments(arguments)]
    try:
        config = check_model(resolve(sources), model_type, is_engine=len(text) % 2 == 0)
    except ConfigError as error:
        assert error.problems and all(problem.strip() for problem in error.problems)
        return
    assert config.origins.keys() == OPTIONS.keys()
    for name, declared in OPTIONS.items():
        value = getattr(config.options, name)
        assert declared.type.check(value, declared.option) == value, name
        assert config.origin(name).kind is not OriginKind.DEFAULT or value == declared.default, name
    assert resolve(sources).options == config.options


# -- the values together ----------------------------------------------------------------------------------------------


def test_replace_keeps_the_rest_and_remembers_the_origin() -> None:
    config = from_text("option.max_input_len=10")
    sized = config.replace(Origin.derived("the table of max_num_tokens"), max_num_tokens=8192)
    assert sized.options.max_num_tokens == 8192
    assert sized.options.max_input_len == 10
    assert not sized.is_set("max_num_tokens")
    served = config.replace(Origin.override("command line --port"), port=9, backend="openvino", predict_timeout=5)
    assert served.is_set("port")
    assert served.options.backend is Backend.OPENVINO
    assert isinstance(served.options.predict_timeout, float)
    assert str(served.origin("port")) == "command line --port"
    assert served.replace(Origin.derived("a rule"), port=2).is_set("port")


def test_the_engine_cache_is_where_it_was_set_or_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert from_text("").engine_cache_dir == Path("/home/someone/.cache/djl-trtllm")
    assert from_text("option.engine_cache_dir=/e").engine_cache_dir == Path("/e")
    assert from_text("option.engine_cache_dir=~/e").engine_cache_dir == Path("/home/someone/e")


def test_the_engine_cache_has_a_place_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert from_text("").engine_cache_dir == tmp_path / "djl-trtllm"


def test_a_configuration_made_by_hand_has_default_origins() -> None:
    config = Config(Options())
    assert config.origin("port") == Origin.default() and not config.is_set("port")
    assert (config.warnings, config.notes, config.overridden, config.model_dir) == ((), (), {}, None)


def test_every_wrong_value_is_reported_with_its_origin() -> None:
    with pytest.raises(ConfigError) as caught:
        from_text("").replace(Origin.override("--port"), port=-1, nothing="x", tgi_compat=3, max_input_len=True)
    assert caught.value.problems[:2] == (
        "inference_port=-1 (--port): expected a whole number, at least 0 and at most 65535",
        "nothing=x (--port): there is no such option",
    )
    assert len(caught.value.problems) == 4


# -- spellings of speculation -----------------------------------------------------------------------------------------


def found(folder: Path, text: str) -> Speculation | None:
    (folder / "drafts.yaml").write_text("method: eagle3\nnum_speculative_tokens: 3\nmodel: org/head\n")
    (folder / "serving.properties").write_text(text.replace(";", "\n"))
    return speculation_of(load(folder, {}))


@by_table("text", "expected")
def test_each_spelling_is_the_same_value(tmp_path: Path, text: str, expected: dict[str, Any] | None) -> None:
    speculation = found(tmp_path, text)
    if speculation is None or expected is None:
        assert (speculation is None) == (expected is None)
        return
    unset: dict[str, Any] = {"extra": {}, **dict.fromkeys(asdict(speculation))}
    assert asdict(speculation) == {**unset, "setting": speculation.setting, "extra": {}, **expected}
    assert speculation.setting.startswith("option.") and "serving.properties:" in speculation.setting


@by_table("text", "said")
def test_what_is_no_speculation_is_one_line_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        found(tmp_path, text)
    (problem,) = refused.value.problems
    assert said in problem and "serving.properties:" in problem


CASES: list[tuple[str, str, str, list[str] | None]] = table(__file__, "rules")
"""Rule, options (";" ends a line), model ("!" for a compiled engine), parts of the message (None: the rule holds)."""


def lines_of(text: str) -> str:
    return text.replace(";", "\n")


def running(config: Config, **values: Any) -> Config:
    """Check a configuration for an engine that does what the options say, except for `values`."""
    return check_running(config, lambda name: values[name] if name in values else getattr(config.options, name))


def findings(text: str, model: str) -> dict[Severity, list[str]]:
    """The messages about these options with this model on an engine that runs with them."""
    kind, engine, compiled_as = model.partition("!")
    try:
        config = from_text(lines_of(text))
        config = running(check_model(config, kind or None, bool(engine), compiled_as=compiled_as or None))
    except ConfigError as error:
        return {Severity.ERROR: list(error.problems), Severity.WARNING: list(error.warnings), Severity.NOTE: []}
    return {Severity.ERROR: [], Severity.WARNING: list(config.warnings), Severity.NOTE: list(config.notes)}


@by_rows(("name", "text", "model", "parts"), CASES)
def test_a_rule_is_broken_or_holds(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, model: str, parts: list[str] | None
) -> None:
    (rule,) = (rule for rule in RULES if rule.name == name)
    if parts is None:
        monkeypatch.setattr(rules, "RULES", (rule,))
        alone = findings(text, model)
        monkeypatch.setattr(rules, "RULES", ())
        assert alone == findings(text, model)
        return
    messages = findings(text, model)
    told = [line for line in messages[rule.severity] if all(part.format(place=PLACE) in line for part in parts)]
    assert len(told) == 1, messages


def test_every_rule_is_broken_and_kept_by_a_case() -> None:
    assert {name for name, _, _, parts in CASES if parts} == {rule.name for rule in RULES}
    assert {name for name, _, _, parts in CASES if parts is None} >= {rule.name for rule in RULES if rule.broken}


def test_every_rule_names_options_whether_it_is_lifted_and_where_it_stands() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES) > 15
    assert [rule.name for rule in RULES for name in rule.options if name not in OPTIONS] == []
    assert [rule.name for rule in RULES if not (rule.options and rule.document and rule.condition)] == []
    lifted = {rule.name: rule.lifted.split(":")[0].split(";")[0] for rule in RULES}
    assert set(lifted.values()) == {"yes", "no", "in part"}
    # A rule that is lifted refuses nothing.
    assert [rule.name for rule in RULES if lifted[rule.name] == "yes" and rule.severity is Severity.ERROR] == []


def test_options_alone_break_no_rule_about_a_model_or_an_engine() -> None:
    for name, text, _, parts in CASES:
        (when,) = (rule.when for rule in RULES if rule.name == name)
        if when is not When.OPTIONS and parts:
            assert (from_text(lines_of(text)).warnings, from_text(lines_of(text)).notes) == ((), ())


def test_what_a_model_breaks_is_added_to_what_was_reported_before() -> None:
    text = "option.smoothquant_alpha=0.5;option.max_tokens=9;option.free_gpu_memory_fraction=0.5;"
    config = from_text(lines_of(f"{text}option.rotary_dim=3;option.quant_algo=W4A16_AWQ"))
    assert (len(config.warnings), len(config.notes)) == (1, 1)
    checked = check_model(config, "falcon", False)
    assert checked.warnings == config.warnings and checked.notes[:1] == config.notes and len(checked.notes) == 3
    assert (checked.options, checked.origins) == (config.options, config.origins)
    assert check_model(config, None, False) is config and running(config) is config


def test_a_refusal_has_the_warnings_of_options_and_of_the_model_with_it() -> None:
    config = from_text("option.awq_format=int4_awq\noption.quantize=smoothquant")
    with pytest.raises(ConfigError) as caught:
        check_model(config, "falcon", True)
    (problem,), (of_options, of_model) = caught.value.problems, caught.value.warnings
    assert problem.startswith("option.quantize=smoothquant (serving.properties:2)")
    assert (of_options.split()[0], of_model.split()[0]) == ("option.awq_format=int4_awq", "option.quantize=smoothquant")


def test_what_the_engine_makes_of_an_option_counts_and_not_what_is_written() -> None:
    text = "option.batch_scheduler_policy=static_batch;option.max_attention_window=8;option.max_num_tokens=512;"
    config = from_text(lines_of(f"{text}option.max_input_len=2048;option.rolling_batch=trtllm"))
    assert len(running(config).warnings) == sum(rule.when is When.RUNNING for rule in RULES)
    policy = SchedulerPolicy.GUARANTEED_NO_EVICT
    other = {"batch_scheduler_policy": policy, "max_attention_window": None, "enable_chunked_prefill": True}
    assert running(config, **other, backend=Backend.PYTORCH) is config


def test_the_context_of_a_configuration_names_values_by_key_and_masks_secrets() -> None:
    text = "option.free_gpu_memory_fraction=0.50\noption.env=A=hunter2\noption.model_id=https://me:hunter2@host/m"
    config = from_text(text).replace(Origin.override("HF_TOKEN=hunter2"), port=1)
    context = RuleContext.of(config, model_type="llama", is_engine=True, compiled_as="awq")
    name = "kv_cache_free_gpu_mem_fraction"
    assert (context.value(name), context.is_set(name), context.is_set("max_input_len")) == (0.5, True, False)
    assert context.format_setting(name) == f"option.{name}=0.5 {PLACE}"
    assert context.written_name(name) == f"option.{name}"
    assert context.format_setting("env") == f"option.env=A={MASK} (serving.properties:2)"
    assert context.format_setting("quantize") == "option.quantize=none (default)"
    assert "hunter2" not in "".join(map(context.format_setting, ("model_id", "port")))
    assert (context.model_type, context.is_engine, context.compiled_as) == ("llama", True, "awq")
