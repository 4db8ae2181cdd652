"""The table of names against the JSON schema of 1.2.1 and NVIDIA's manifest of the LLM's arguments."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import by_table
from tools.tensorrt_llm import manifest
from tools.tensorrt_llm.schema import REASONS, REDUCED, differences, main, report
from tools.tensorrt_llm.schema_types import kinds_of, reduced
from tools.tensorrt_llm.seen import same_type

EXCERPT: dict[str, Any] = json.loads(Path(__file__).with_name("excerpt.json").read_text())


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
        "UserProvidedDecodingConfig": "a class of the schema that the table lacks",
    }
    assert excerpt["version"] == "1.2.1"
    assert excerpt["source"] == "model_json_schema(), inside release:1.2.1"
    assert excerpt["classes"]["LLM.tensorrt"]["enable_build_cache"]["type"] == ["BuildCacheConfig", "boolean"]
    assert reduced(excerpt) == excerpt


@by_table("owner", "name", "change", "text", apart=True)
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


@by_table("owner", "values", "text", apart=True)
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
    lines, agreed = report(found, {"UserProvidedDecodingConfig": "because"})
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


@by_table("annotation", "kinds")
def test_annotations_in_all_spellings_are_the_same_kinds(annotation: str, kinds: list[str]) -> None:
    assert kinds_of(annotation) == kinds


@by_table("first", "second", "same")
def test_types_are_the_same_when_they_say_the_same(first: str, second: str, same: bool) -> None:
    assert same_type(first, second) is same
    assert same_type(second, first) is same


# -- NVIDIA's manifest of the LLM's arguments --------------------------------------------------------------------------


def test_the_table_ends_with_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    assert manifest.main([]) == 0, capsys.readouterr().out
    # The arguments that 1.4 lacks, 1.3 has.
    assert manifest.main(["--version", "1.3.0"]) == 1
    said = capsys.readouterr().out
    for ended in ("sampler_type", "disable_flashinfer_sampling", "kv_cache_config.onboard_blocks"):
        assert f"\n{ended}: " in f"\n{said}"


def test_nvidias_own_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "manifest.json"
    rows = [
        {"path": path, "annotation": "Optional[Literal[...]]" if choices else "int", "allowed_values": sorted(choices)}
        for path, choices in manifest.paths(manifest.PATHS).items()
        if path != "stream_interval"
    ]
    file.write_text(json.dumps({"TorchLlmArgs": rows}))
    assert manifest.main([str(file)]) == 1
    assert "stream_interval: in the table, not in the manifest" in capsys.readouterr().out


def test_choices_are_those_of_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "paths.txt"
    file.write_text(
        manifest.PATHS.read_text().replace("guided_decoding_backend xgrammar", "guided_decoding_backend outlines")
    )
    assert manifest.main([str(file)]) == 1
    said = capsys.readouterr().out
    assert "guided_decoding_backend: xgrammar in the table alone, outlines in the manifest" in said


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    for content in ("{}", "{"):
        file.write_text(content)
        with pytest.raises(SystemExit):
            manifest.main([str(file)])
