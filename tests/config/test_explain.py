from __future__ import annotations

import json
from pathlib import Path

import pytest

from djl_trtllm.config import Backend, Config, load
from djl_trtllm.config.explain import (
    as_json,
    diff_as_json,
    plain_value,
    render,
    render_diff,
    shown_value,
)
from djl_trtllm.config.options import OPTIONS, DeclaredOption
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text, items, printed
from tests.support.tables import by_rows


def shown(config: Config, backend: Backend | None = None, *, only_set: bool = False) -> str:
    return printed(render(config, backend, only_set=only_set, describe=effect_of))


def effect_of(declared: DeclaredOption, backend: Backend) -> str:
    """What a backend's map would say."""
    return declared.option.effect_everywhere or f"effect of {declared.name} on {backend}"


def test_the_list_shows_value_origin_and_effect_on_the_backend_that_was_chosen() -> None:
    config = from_text("option.max_num_tokens=4096\noption.model_id=[red]m[/red]")
    for chosen, backend in ((Backend.OPENVINO, "openvino"), (None, "auto")):
        text = shown(config, chosen)
        assert text.splitlines()[0] == f"Configuration (backend: {backend})" and "[red]m[/red]" in text
        found = items(text)
        assert found["option.max_num_tokens = 4096 tokens"] == {
            "from": "serving.properties:1",
            "effect": f"effect of max_num_tokens on {backend}",
        }
        assert found["option.strict = false"] == {"from": "default", "effect": OPTIONS["strict"].option.effect}


def test_the_list_has_every_option_or_only_those_set() -> None:
    config = load(None, {"OPTION_BACKEND": "openvino", "SERVING_DOWNLOAD_DIR": "/d"})

    def keys(text: str) -> list[str]:
        return [heading.split(" = ")[0] for heading in items(text)]

    assert keys(shown(config)) == [declared.key for declared in OPTIONS.values()]
    only_set = ["option.backend", "download_dir", "option.engine_cache_dir"]
    assert sorted(keys(shown(config, only_set=True))) == sorted(only_set)


def test_groups_are_apart_and_defaults_dim() -> None:
    config = from_text("option.model_id=a\noption.revision=b\noption.max_input_len=8")
    starts = [line[:6] for line in shown(config, only_set=True).splitlines() if not line.startswith(" ")]
    assert starts == ["Config", "", "option", "option", "", "option"]
    groups = len({declared.group for declared in OPTIONS.values()})
    assert shown(config).splitlines().count("") == groups
    styled = printed(render(config), styles=True)
    (set_line,) = [line for line in styled.splitlines() if "option.max_input_len" in line]
    (default_line,) = [line for line in styled.splitlines() if "option.max_output_len" in line]
    assert "\x1b[2m" in default_line and "\x1b[1m" in set_line


def test_places_are_relative_to_the_models_directory(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_input_len=8\n")
    text = shown(load(tmp_path, {}), only_set=True)
    assert text.splitlines()[0] == f"Configuration (backend: auto) of {tmp_path}"
    assert items(text)["option.max_input_len = 8 tokens"]["from"] == "serving.properties:1"


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken(width: int) -> None:
    path = "/" + "x" * 90
    config = load(None, {"OPTION_MODEL_ID": path})
    lines = render(config, width=width, describe=effect_of).plain.splitlines()
    long = [line.strip() for line in lines if len(line) > width]
    assert all(" " not in line.removeprefix("from    ").removeprefix("effect  ") for line in long)
    words = shown(config).split()
    assert " ".join(lines).split() == words


def test_what_was_beaten_is_shown() -> None:
    config = load(None, {"TENSOR_PARALLEL_DEGREE": "2", "SM_NUM_GPUS": "4"})
    assert as_json(config)["options"]["tensor_parallel_degree"]["overridden"] == [
        {"wrote": "SM_NUM_GPUS=4", "origin": "environment variable SM_NUM_GPUS"}
    ]
    (item,) = items(shown(config, only_set=True)).values()
    assert item["from"] == "environment variable TENSOR_PARALLEL_DEGREE, overrides SM_NUM_GPUS=4 (environment)"


def test_json_is_plain_and_complete(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.backend=openvino\noption.dtype=half # comment\n")
    config = load(tmp_path, {"SERVING_DOWNLOAD_DIR": "/d", "JAVA_OPTS": "x"})
    data = json.loads(json.dumps(as_json(config, describe=effect_of)))
    assert (data["backend"], data["model_dir"]) == ("openvino", str(tmp_path))
    assert list(data["options"]) == list(OPTIONS)
    assert data["options"]["dtype"] == {
        "key": "option.dtype",
        "value": "fp16",
        "default": "auto",
        "unit": None,
        "set": True,
        "origin": {
            "kind": "file",
            "where": f"{tmp_path}/serving.properties",
            "line": 2,
            "text": f"{tmp_path}/serving.properties:2",
        },
        "effect": "effect of dtype on openvino",
        "overridden": [],
    }
    cache = data["options"]["engine_cache_dir"]
    assert (cache["value"], cache["origin"]["kind"], cache["set"]) == ("/d/djl-trtllm", "derived", False)
    length = data["options"]["max_input_len"]
    assert (length["unit"], length["value"], length["origin"]) == (
        "tokens",
        1024,
        {"kind": "default", "where": None, "line": None, "text": "default"},
    )
    assert data["warnings"] == list(config.warnings) != []
    assert data["notes"] == list(config.notes) != []


@by_rows(
    ("name", "value", "shown", "plain"),
    [
        ("max_input_len", 8, "8 tokens", 8),
        ("tensor_parallel_degree", "max", "max", "max"),
        ("model_id", "x" * 60, "x" * 60, "x" * 60),
        ("model_id", "x" * 61, "x" * 57 + "...", "x" * 61),
        ("model_id", "a\tb", r"a\tb", "a\tb"),
        ("trust_remote_code", True, "true", True),
        ("max_attention_window", (8, 16), "8,16", [8, 16]),
        ("backend", Backend.OPENVINO, "openvino", "openvino"),
        ("cache_dir", Path("/c"), "/c", "/c"),
        ("predict_timeout", 0.5, "0.5 seconds", 0.5),
        ("max_attention_window", None, "not set: the longest sequence", None),
        ("lora_dir", None, "not set", None),
    ],
)
def test_a_value_is_shown_with_its_unit_and_shortened_and_is_plain_in_json(
    name: str, value: object, shown: str, plain: object
) -> None:
    assert shown_value(OPTIONS[name], value) == shown
    found = plain_value(OPTIONS[name], value)
    assert found == plain and type(found) is type(plain)


def test_no_secret_of_a_hostile_configuration_is_shown(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(
        "option.env=HF_TOKEN=hunter2,PLAIN=hunter2\n"
        "option.model_id=https://me:hunter2@host/model?token=hunter2&x=1\n"
        "option.max_input_len=HF_TOKEN=hunter2\n"
        "keystore_pass=hunter2\noption.hf_token=hunter2\n"
    )
    environ = {
        "HF_TOKEN": "hunter2",
        "OPTION_ENV": "A=hunter2",
        "SERVING_KEYSTORE_PASS": "hunter2",
        "HF_MODEL_ID": "s3://me:hunt@er2hunter2@bucket/model",
    }
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, environ)
    assert "hunter2" not in str(caught.value)
    config = load(tmp_path, environ, arguments=["max_input_len=8"])
    one, other = load(tmp_path, {}, arguments=["max_input_len=8"]), config
    told = [shown(config), json.dumps(as_json(config)), *config.warnings, *config.notes]
    told += [json.dumps(diff_as_json(one, other))]
    told.append(printed(render_diff(one, other, ("a", "b"))))
    assert "hunter2" not in "\n".join(told)
    assert vars(config.options)["env"] == "HF_TOKEN=hunter2,PLAIN=hunter2"


def test_both_sides_have_value_and_origin() -> None:
    one, other = from_text("option.max_attention_window=8,16"), from_text("option.max_input_len=4")
    assert diff_as_json(one, other)["max_attention_window"] == {
        "key": "option.max_attention_window",
        "sides": [
            {"value": [8, 16], "origin": "serving.properties:1"},
            {"value": None, "origin": "default"},
        ],
    }
    text = printed(render_diff(one, other, ("a", "b")))
    assert text.splitlines()[0] == "a and b: 2 options differ"
    assert printed(render_diff(one, from_text(""), ("a", "b"))).splitlines()[0] == "a and b: 1 option differs"
    assert items(text) == {
        "option.max_input_len": {"first": "1024 tokens (default)", "second": "4 tokens (serving.properties:1)"},
        "option.max_attention_window": {
            "first": "8,16 (serving.properties:1)",
            "second": "not set: the longest sequence (default)",
        },
    }
    assert printed(render_diff(one, one, ("a", "b"))).strip() == "a and b: the same"
