from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from djl_trtllm.config import Config
from djl_trtllm.config.compat import truss
from djl_trtllm.config.compat.foreign_format import ForeignSetting as Entry, FormatError, presets as presets_of
from djl_trtllm.config.compat.truss import (
    BUILD_PRESETS,
    ENGINE_PRESETS,
    IGNORED,
    MARKS,
    OPTION_OF,
    QUANTIZATION,
    ROUTES,
    STACK_PRESETS,
    TO_ACT_ON,
    entries,
)
from djl_trtllm.config.explain import as_json, render
from djl_trtllm.config.options import find
from djl_trtllm.config.resolve import resolve
from djl_trtllm.config.sources import Layer, Source
from djl_trtllm.errors import ConfigError
from tests.config.helpers import printed, resolves_or_is_refused, values
from tests.support.tables import by_rows, by_table, table


def from_text(text: str) -> Config:
    return resolve(truss.parse_config(text, "config.yaml"))


def nested(name: str, value: str) -> str:
    """`a.b` and `1` as YAML: `a: {b: 1}`, under a key by which a Truss is known."""
    *sections, last = name.split(".")
    text = f"{last}: {value}"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return f"python_version: py311\n{text}\n" if name.partition(".")[0] != "python_version" else f"{text}\n"


@by_rows(
    ("name", "value", "option", "expected"),
    table(__file__, "values_of_truss"),
)
def test_a_value_becomes_its_option_and_keeps_its_line(name: str, value: str, option: str, expected: object) -> None:
    config = from_text(nested(name, value))
    assert getattr(config.options, option) == expected
    assert str(config.origin(option)) == "config.yaml:2"


def test_presets_are_weaker_than_everything_and_max_num_tokens_widens_nothing() -> None:
    config = from_text("trt_llm:\n  runtime:\n    max_batch_size: 8\n")
    assert (config.options.max_rolling_batch_size, config.options.max_num_tokens) == (8, 8192)
    assert not config.overridden and not config.warnings


@pytest.mark.parametrize("secret", ["my_hf_api_key", "hunter2"])
def test_the_token_of_the_hub_is_used_and_no_secret_is_shown(secret: str) -> None:
    text = f"model_metadata: {{tensor_parallelism: 1}}\nsecrets:\n  hf_access_token: {secret}\n  other: {secret}\n"
    config = from_text(text)
    assert config.options.hf_access_token == secret
    (warning,) = config.warnings
    assert "secrets.other (line 4): nothing reads this secret" in warning
    assert secret not in warning + printed(render(config)) + json.dumps(as_json(config))


def test_a_name_without_effect_is_answered() -> None:
    assert len(IGNORED) > 40
    silent = []
    for name, answer in IGNORED.items():
        config = from_text(nested(name, ROUTES[0] if name.endswith("_route") else "x"))
        told, other = (config.warnings, config.notes) if answer in TO_ACT_ON else (config.notes, config.warnings)
        if not any(line.endswith(f": {answer}") for line in told) or any(answer in line for line in other):
            silent.append(name)
    assert silent == []


_VALUES = st.text(max_size=8) | st.sampled_from(["", "null", "true", "8", "0.1", "fp8", "v2", "A100:2", "[1, 2]", "{}"])


@given(
    st.lists(
        st.tuples(st.sampled_from([*OPTION_OF, *IGNORED, "secrets.x", "resources.accelerator"]), _VALUES), max_size=5
    )
)
def test_any_values_resolve_or_are_refused(pairs: list[tuple[str, str]]) -> None:
    resolves_or_is_refused(truss.parse_config("".join(nested(name, value) for name, value in pairs), "config.yaml"))


@given(st.text(alphabet=st.sampled_from("trt_llm:build -&*[]{}\n\t 'x\"|>!?%@")) | st.text())
def test_any_text_resolves_or_is_refused(text: str) -> None:
    resolves_or_is_refused(truss.parse_config(text, "config.yaml"))
    resolves_or_is_refused(truss.parse_config("trt_llm:\n" + text, "config.yaml"))


# -- What is read from a Truss `config.yaml`, entry by entry --


PRESETS = {"build": BUILD_PRESETS, "engine": ENGINE_PRESETS, "stack": STACK_PRESETS, "none": {}}


def read(text: str) -> Source:
    """The source of the file itself, without presets."""
    return truss.parse_config(text, "config.yaml")[0]


def preset(text: str, *, has_repository: bool = False) -> str:
    """Which presets come with a file."""
    _, *sources = truss.parse_config(text, "config.yaml", has_repository=has_repository)
    found = dict(values(sources[0])) if sources else {}
    (name,) = (name for name, presets in PRESETS.items() if presets == found)
    return name


def test_a_truss_is_known_by_its_keys() -> None:
    assert all(map(truss.is_truss, ("trt_llm:\n", "a: 1\nmodel_metadata : {}\n", "secrets: {}")))
    assert not any(map(truss.is_truss, (" trt_llm:\n", "# trt_llm:\n", "trt_llm_x:\n", "")))


def test_a_file_is_read_with_its_presets_or_beside_a_repository(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes("model_metadata: {engine_repository: é}".encode("utf-8-sig"))
    first, second = truss.read_config(path)
    assert values(first) == [("option.model_id", "é")] and second.layer is Layer.PRESET
    assert str(first.settings[0].origin) == f"{path}:1"
    assert truss.read_config(path, has_repository=True) == [first]


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert truss.read_config(path)[0].problems == (f"{path} cannot be read: No such file or directory",)
    for content, problem in (
        (b"\xff", f"{path} is not UTF-8 text; save it as UTF-8"),
        (b"- a", f"{path}:1: expected `key: value` lines"),
    ):
        path.write_bytes(content)
        assert truss.read_config(path) == [Source(Layer.FOREIGN, problems=(problem,))]


@by_table("text", "which")
def test_presets_are_those_of_the_generation(text: str, which: str) -> None:
    assert preset(text) == which
    # What Truss builds has no repository, so one beside it is another's.
    assert preset(text, has_repository=True) == ("none" if which == "engine" else which)


@by_table("text", "settings", "answers")
def test_an_entry_is_a_setting_or_is_answered(text: str, settings: dict[str, str], answers: list[str]) -> None:
    source = read(text)
    found = {setting.key.removeprefix("option."): setting.value for setting in reversed(source.settings)}
    assert found == settings
    said = (*source.warnings, *source.problems, *source.unknown, *source.notes)
    assert len(said) == len(answers)
    for line, answer in zip(said, answers, strict=True):
        assert re.fullmatch(re.escape(answer).replace(r"\.\*", ".*"), line)


def test_values_are_reported_where_they_matter_and_not_where_they_may_be_secret() -> None:
    text = (
        "environment_variables:\n  A: hunter2\nmodel_metadata:\n  example_model_input:\n    prompt: hunter2\n"
        "  other: hunter2\nrequirements:\n- a\n- b\nruntime:\n  predict_concurrency: 4\nresources:\n  cpu: '3'\n"
        "trt_llm:\n  build:\n    base_model: llama\n"
    )
    source = read(text)
    (warning,) = source.warnings
    assert warning.startswith("config.yaml: environment_variables.A (line 2): variables are not read from a file")
    names = [note.partition(": ")[2].rpartition(": ")[0] for note in source.notes]
    assert names == [
        "model_metadata.example_model_input (line 5)",
        "model_metadata.other (line 6)",
        "requirements (line 8)",
        "runtime.predict_concurrency=4 (line 11)",
        "resources.cpu=3 (line 13)",
        "trt_llm.build.base_model=llama (line 16)",
    ]


@by_table("accelerator", "tensor", "pipeline", "told")
def test_gpus_that_do_not_fit_the_parallelism_are_reported_truss_files(
    accelerator: str, tensor: str, pipeline: str, told: str | None
) -> None:
    text = (
        f"resources:\n  accelerator: {accelerator}\n"
        f"model_metadata:\n  tensor_parallelism: {tensor}\n  pipeline_parallelism: {pipeline}\n"
    )
    place = f"resources.accelerator={accelerator} (config.yaml:2)"
    assert read(text).warnings == ((f"{place}: {told}",) if told else ())
    assert read(text.replace("resources:\n  accelerator", "runtime:\n  other")).warnings == ()


def test_every_name_is_an_option_and_has_one_meaning() -> None:
    presets = {**BUILD_PRESETS, **ENGINE_PRESETS, **STACK_PRESETS}
    keys = [*OPTION_OF.values(), *presets, *(key for settings in QUANTIZATION.values() for key in settings)]
    assert len(keys) > 60 and [key for key in keys if find(key) is None] == []
    assert sorted(OPTION_OF.keys() & IGNORED.keys()) == []
    assert set(IGNORED.values()) >= TO_ACT_ON and len(TO_ACT_ON) == 5
    names = {name.partition(".")[0] for name in (*OPTION_OF, *IGNORED)}
    assert set(MARKS) - names == {"secrets"}


def test_presets_and_quantisations_have_values_that_their_options_take() -> None:
    for settings in (BUILD_PRESETS, ENGINE_PRESETS, STACK_PRESETS, *QUANTIZATION.values()):
        config = resolve([presets_of("Truss", dict(settings))])
        assert config.warnings == () and settings


@by_table("text", "expected")
def test_every_value_has_the_path_of_its_keys_and_its_line(text: str, expected: list[tuple[str, str, int]]) -> None:
    assert entries(text) == [Entry(*each) for each in expected]


DEEP = "".join(f"{'  ' * depth}a:\n" for depth in range(60))


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcde", "bcdef", strict=True)
)


TOO_MUCH: list[tuple[str, int, str]] = [
    (DEEP, 52, "more than 50 nested levels"),
    ("a: " + "[" * 51 + "1" + "]" * 51, 1, "more than 50 nested levels"),
    ("a: " + "[" * 5_000, 1, "this is not YAML: its values are nested too deep"),
    (BOMB, 1, "more than 20000 values"),
]


@by_rows(
    ("text", "line", "says"),
    [*table(__file__, "yaml_mistakes"), *TOO_MUCH],
)
def test_a_mistake_is_reported_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        entries(text)
    assert re.fullmatch(says, str(caught.value), re.DOTALL), str(caught.value)
    assert caught.value.line == line


def test_as_many_levels_and_values_as_there_may_be_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{'  ' * depth}a:\n" for depth in range(50))
    assert entries(text) == [Entry(".".join("a" * 50), "", 50)]
    assert entries("a: " + "[" * 49 + "1" + "]" * 49) == [Entry("a", "1", 1)]
    monkeypatch.setattr(truss, "_MOST_VALUES", 3)
    assert len(entries("a: [1, 2, 3]")) == 3
    with pytest.raises(FormatError, match="more than 3 values"):
        entries("a: [1, 2, 3, 4]")


def test_a_model_that_writes_no_text_is_refused_whatever_its_version() -> None:
    for model in ("whisper", "whisper_large_v3"):
        with pytest.raises(ConfigError, match="speech recognition"):
            from_text(nested("trt_llm.build.base_model", model))
    from_text(nested("trt_llm.build.base_model", "llama_whisper"))
