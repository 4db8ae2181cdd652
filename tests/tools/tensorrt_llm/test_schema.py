"""The table of names against the JSON schema of TensorRT-LLM 1.2.1, and how they are compared."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tools.tensorrt_llm.schema import REASONS, REDUCED, differences, main, report
from tools.tensorrt_llm.schema_types import kinds_of, reduced
from tools.tensorrt_llm.seen import same_type

EXCERPT: dict[str, Any] = {
    "engine_version": "1.2.1",
    "image_ref": "release:1.2.1",
    "discovery_method": "model_json_schema()",
    "engine_params": {
        "max_num_tokens": {"type": "integer | None", "default": 8192, "deprecated": False},
        "load_format": {"type": "Literal['auto', 'dummy']", "default": "auto", "deprecated": False},
        "enable_build_cache": {"type": "Union[a.build_cache.BuildCacheConfig, bool]", "default": False},
    },
    "sampling_params": {"stop": {"type": "str | list[str] | None", "default": None}},
    "$defs": {
        "DynamicBatchConfig": {
            "properties": {
                "enable_batch_size_tuning": {"type": "boolean"},
                "enable_max_num_tokens_tuning": {"type": "boolean"},
                "dynamic_batch_moving_average_window": {"type": "integer"},
            },
            "required": [
                "enable_batch_size_tuning",
                "enable_max_num_tokens_tuning",
                "dynamic_batch_moving_average_window",
            ],
        },
        "SchedulerConfig": {
            "properties": {
                "capacity_scheduler_policy": {
                    "$ref": "#/$defs/CapacitySchedulerPolicy",
                    "default": "GUARANTEED_NO_EVICT",
                },
                "context_chunking_policy": {
                    "anyOf": [{"$ref": "#/$defs/ContextChunkingPolicy"}, {"type": "null"}],
                    "default": None,
                },
                "dynamic_batch_config": {
                    "anyOf": [{"$ref": "#/$defs/DynamicBatchConfig"}, {"type": "null"}],
                    "default": None,
                },
            }
        },
        "CapacitySchedulerPolicy": {"enum": ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"]},
        "MedusaDecodingConfig": {"properties": {"medusa_choices": {"enum": ["a", None]}}},
    },
}


def told(schema: dict[str, Any]) -> dict[str, str]:
    return {found.subject: found.text for found in differences(schema)}


@pytest.fixture
def excerpt() -> dict[str, Any]:
    """Reduced, and with what it leaves out of LLM and SamplingParams."""
    found = reduced(copy.deepcopy(EXCERPT))
    for owner, names in json.loads(REDUCED.read_text())["classes"].items():
        if owner in found["classes"]:
            found["classes"][owner] = names | found["classes"][owner]
    return found


def test_the_table_agrees_with_the_schema_of_1_2_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Every difference has its reason, and every reason its difference."""
    status = main([])
    assert status == 0, capsys.readouterr().out


def test_an_excerpt_of_the_whole_schema_is_reduced_and_agrees(excerpt: dict[str, Any]) -> None:
    assert told(excerpt) == {
        "LLM.tensorrt.batched_logits_processor": (
            "type Optional[object] in the table, BatchedLogitsProcessor or null in the schema"
        ),
        "MedusaDecodingConfig": "a class of the schema that the table lacks",
    }
    assert excerpt["version"] == "1.2.1"
    assert excerpt["source"] == "model_json_schema(), inside release:1.2.1"
    assert excerpt["classes"]["LLM.tensorrt"]["enable_build_cache"]["type"] == ["BuildCacheConfig", "boolean"]
    assert reduced(excerpt) == excerpt


@pytest.mark.parametrize(
    ("owner", "name", "change", "text"),
    [
        ("LLM.tensorrt", "max_num_tokens", {"default": 4096}, "default 8192 in the table, 4096 in the schema"),
        ("LLM.tensorrt", "load_format", {"type": ["'auto'"]}, "type Literal['auto', 'dummy'] in the table, 'auto' in"),
        ("LLM.tensorrt", "new", {"type": ["integer"], "default": 1}, "in the schema only, ['integer'] = 1"),
        ("SchedulerConfig", "dynamic_batch_config", None, "in the table only, from 1.0.0 on"),
        ("DynamicBatchConfig", "enable_batch_size_tuning", {"default": None}, "default 'required' in the table, None"),
        ("SamplingParams", "n", {"default": True}, "default 1 in the table, True in the schema"),
        ("Unknown", "x", {"type": ["integer"], "default": 1}, "a class of the schema that the table lacks"),
    ],
)
def test_names_types_and_defaults_count(
    excerpt: dict[str, Any], owner: str, name: str, change: dict[str, Any] | None, text: str
) -> None:
    names = excerpt["classes"].setdefault(owner, {})
    if change is None:
        del names[name]
    else:
        names[name] = {**names.get(name, {}), **change}
    found = told(excerpt)
    assert text in found.get(f"{owner}.{name}", found.get(owner, ""))


@pytest.mark.parametrize(
    ("owner", "values", "text"),
    [
        ("BatchingType", ["INFLIGHT", "STATIC", "OTHER"], "values ['OTHER'] in the schema only"),
        ("BatchingType", ["INFLIGHT"], "values ['STATIC'] in the table only"),
        ("Unknown", ["A"], "an enum of the schema that the table lacks"),
    ],
)
def test_members_of_enums_count(excerpt: dict[str, Any], owner: str, values: list[str], text: str) -> None:
    excerpt["enums"] = {owner: values}
    assert told(excerpt)[owner] == text


def test_a_difference_needs_a_reason_and_a_reason_a_difference(excerpt: dict[str, Any]) -> None:
    found = list(differences(excerpt))
    reasons = {difference.subject: "because" for difference in found}
    lines, agreed = report(found, reasons)
    assert agreed
    assert lines[-1] == "2 differences, 0 without a reason; 0 reasons for none"
    assert all(line.endswith(": because") for line in lines[:-1])
    lines, agreed = report(found, {"MedusaDecodingConfig": "because"})
    assert not agreed
    assert "in the schema: NO REASON" in lines[0]
    lines, agreed = report(found, reasons | {"Gone.name": "because"})
    assert not agreed
    assert "Gone.name: no difference, but a reason in schema_reasons.yaml" in lines


def test_the_command_takes_a_file_and_fails_without_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, none, out = tmp_path / "schema.discovered.json", tmp_path / "none.yaml", tmp_path / "reduced.json"
    file.write_text(json.dumps(EXCERPT))
    none.write_text("")
    assert main([str(file), "--reasons", str(none), "--reduce", str(out)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("TensorRT-LLM 1.2.1, model_json_schema(), inside release:1.2.1\n")
    assert "LLM.tensorrt.dtype: in the table only" in printed
    assert json.loads(out.read_text()) == reduced(EXCERPT)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_what_is_no_schema_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "file.json")])
    assert "is no schema: " in capsys.readouterr().err


def test_reasons_are_sentences() -> None:
    import yaml

    assert all(reason.endswith(".") for reason in yaml.safe_load(REASONS.read_text()).values())


@pytest.mark.parametrize(
    ("annotation", "kinds"),
    [
        ("Optional[int]", ["integer", "null"]),
        ("int | None", ["integer", "null"]),
        ("Union[str, Path]", ["string"]),
        ("Literal['b', 'a']", ["'a'", "'b'"]),
        ("Literal['a', None]", ["'a'", "null"]),
        ("Optional[Union[str, List[str]]]", ["array", "null", "string"]),
        ("Dict[str, str]", ["object"]),
        ("a.b.LoraConfig", ["LoraConfig"]),
        ("Optional[torch.Tensor]", ["Tensor", "null"]),
        ("float", ["number"]),
        ("bool", ["boolean"]),
    ],
)
def test_annotations_in_all_spellings_are_the_same_kinds(annotation: str, kinds: list[str]) -> None:
    assert kinds_of(annotation) == kinds


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Optional[List[int]]", "typing.Optional[typing.List[int]]", True),
        ("Optional[int]", "int | None", True),
        ("Union[str, int, None]", "Optional[Union[int, str]]", True),
        ("int", "Annotated[PositiveInt, Gt(0)]", True),
        ("Literal['a', 'b']", "Literal['b', 'a']", True),
        ("KvCacheConfig", "tensorrt_llm.llmapi.llm_args.KvCacheConfig", True),
        ("Optional[RequestOutput]", "Optional['RequestOutput']", True),
        ("Literal['a']", "Literal['a', 'b']", False),
        ("Optional[int]", "int", False),
        ("List[int]", "List[str]", False),
    ],
)
def test_types_are_the_same_when_they_say_the_same(first: str, second: str, same: bool) -> None:
    assert same_type(first, second) is same
    assert same_type(second, first) is same
