from __future__ import annotations

from pathlib import Path

import javaproperties
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.config import load, parse_properties, read_arguments, read_properties
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


def test_arguments_may_leave_the_prefix_out() -> None:
    source = read_arguments(["max_input_len=1", "option.dtype=half", "job_queue_size=2"])
    assert [setting.key for setting in source.settings] == ["option.max_input_len", "option.dtype", "job_queue_size"]
    assert len(read_arguments(["no value", "=3"]).problems) == 2
