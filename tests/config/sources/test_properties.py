from __future__ import annotations

from pathlib import Path

import javaproperties
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.config import (
    Layer,
    Origin,
    Setting,
    Source,
    load,
    parse_properties,
    read_arguments,
    read_properties,
)
from djl_trtllm.config.masking import MASK
from djl_trtllm.errors import ConfigError

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


def test_separators_and_escapes_are_javas() -> None:
    source = parse_properties("a:1\nb 2\nc\\ d=3\ne=\\u00e9\\tx\nf\n", "f")
    values = {setting.key: setting.value for setting in source.settings}
    assert values == {"a": "1", "b": "2", "c d": "3", "e": "é\tx", "f": ""}


def test_a_duplicate_key_warns_with_both_lines_and_the_last_counts() -> None:
    source = parse_properties("a=1\n\na=2\n", "f.properties")
    assert [setting.value for setting in source.settings] == ["2"]
    (warning,) = source.warnings
    assert "f.properties:1" in warning and "line 3" in warning


def test_a_broken_escape_is_a_problem_with_its_line() -> None:
    (problem,) = parse_properties("a=1\nb=C:\\users\n", "f").problems
    assert problem.startswith("f:2:")
    assert "write a backslash as" in problem


def test_utf_8_is_read_with_or_without_a_mark_and_latin_1_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "serving.properties"
    for data in ("option.model_id=/é".encode(), "option.model_id=/é".encode("utf-8-sig"), b"option.model_id=/\xe9"):
        path.write_bytes(data)
        (setting,) = read_properties(path).settings
        assert (setting.key, setting.value) == ("option.model_id", "/é")


def test_a_missing_file_is_no_problem(tmp_path: Path) -> None:
    assert load(tmp_path, {}).options.max_input_len == 1024


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, {})


def test_load_remembers_the_directory_and_the_files_line(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("\noption.max_input_len=7\n")
    config = load(tmp_path, {})
    assert config.model_dir == tmp_path
    assert str(config.origin("max_input_len")) == f"{tmp_path}/serving.properties:2"


def test_a_servers_own_file_is_read_when_given(tmp_path: Path) -> None:
    path = tmp_path / "config.properties"
    path.write_text("inference_address=http://127.0.0.1:81\n")
    assert load(None, {}, server_properties=path).options.port == 81


def test_a_file_that_cannot_be_read_is_reported_with_the_reason(tmp_path: Path) -> None:
    source = read_properties(tmp_path, Layer.SERVER_FILE)
    assert source == Source(Layer.SERVER_FILE, problems=(f"{tmp_path} cannot be read: Is a directory",))
    assert read_properties(tmp_path / "nowhere", Layer.SERVER_FILE) == Source(Layer.SERVER_FILE)


def test_a_source_has_its_layer_whatever_was_wrong() -> None:
    assert parse_properties("a=1", "f").layer is Layer.FILE
    for text in ("a=1", "a=1\na=2", "a=\\u00"):
        assert parse_properties(text, "f", Layer.SERVER_FILE).layer is Layer.SERVER_FILE


def test_what_stands_before_a_broken_escape_is_read() -> None:
    source = parse_properties("a=1\na=2\nb=\\u00", "f")
    assert [(setting.key, setting.value) for setting in source.settings] == [("a", "2")]
    assert source.warnings == ("f:1 and line 2: a is set twice; the last one is used",)
    assert len(source.problems) == 1


# -- settings and layers -----------------------------------------------------------------------------------------------


def setting(value: str, key: str = "option.x", wrote: str = "X", wrote_value: str | None = None) -> Setting:
    return Setting(key, value, Origin.file("f", 3), wrote, wrote_value)


def test_a_setting_is_shown_as_the_user_wrote_it() -> None:
    assert setting("1").shown == "X=1"
    assert setting("6291456", wrote_value="6").shown == "X=6"
    assert setting("x" * 80).shown == "X=" + "x" * 80
    assert setting("x" * 81).shown == "X=" + "x" * 77 + "..."
    assert setting("a\tb").shown == r"X=a\tb"


def test_a_secret_is_masked_by_the_key_or_by_the_name_that_the_user_wrote() -> None:
    assert setting("hunter2", key="option.hf_token").shown == f"X={MASK}"
    assert setting("hunter2", wrote="HF_TOKEN").shown == f"HF_TOKEN={MASK}"


def test_a_setting_is_cited_with_its_place() -> None:
    assert (setting("1").place, setting("1").formatted) == ("f:3", "X=1 (f:3)")
    variable = Setting("option.x", "1", Origin.environment("X"), "X")
    assert (variable.place, variable.formatted) == ("environment", "X=1 (environment)")
    assert not variable.alone and variable.wrote_value is None


def test_users_write_options_by_name_in_files_on_the_command_line_and_in_option_variables() -> None:
    own = {layer for layer in Layer if layer.has_own_names}
    assert own == {Layer.ARGUMENTS, Layer.FILE, Layer.OPTION, Layer.SERVER_FILE}


def test_the_page_names_every_layer() -> None:
    page = (Path(__file__).parents[3] / "docs" / "options.md").read_text(encoding="utf-8")
    rows = page.partition("## Precedence")[2].partition("\n## ")[0]
    assert [layer.value for layer in Layer if f"| {layer.value} |" not in rows.replace("\\*", "*")] == []


# -- the command line --------------------------------------------------------------------------------------------------


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


def test_arguments_may_leave_the_prefix_out() -> None:
    source = read_arguments(["max_input_len=1", "option.dtype=half", "job_queue_size=2"])
    assert [setting.key for setting in source.settings] == ["option.max_input_len", "option.dtype", "job_queue_size"]
    assert len(read_arguments(["no value", "=3"]).problems) == 2
