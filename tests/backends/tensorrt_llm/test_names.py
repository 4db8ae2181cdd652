"""The table of TensorRT-LLM's names: what holds of every row, and what a version has."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib import resources
from itertools import pairwise

import pytest
from packaging.version import Version

from djl_trtllm.backends.tensorrt_llm.names import (
    KNOWN_VERSIONS,
    REQUIRED,
    Member,
    all_members,
    default_of,
    eras,
    has,
    members,
    module_of,
    owners,
)

ENGINE_BACKEND = ("LLM.tensorrt", "BuildConfig", "PluginConfig", "KVCacheType")


def rows_of_one_name() -> list[list[Member]]:
    grouped: dict[tuple[str, str], list[Member]] = defaultdict(list)
    for row in all_members():
        grouped[row.owner, row.name].append(row)
    return list(grouped.values())


# -- rows --------------------------------------------------------------------------------------------------------------


def test_the_file_has_one_row_per_line_in_order() -> None:
    """So that a change of one row is a change of one line."""
    text = resources.files("djl_trtllm.backends.tensorrt_llm").joinpath("names.json").read_text()
    lines = [line.rstrip(",") for line in text.splitlines() if line.startswith('{"owner":')]
    rows = [json.loads(line) for line in lines]
    assert len(rows) == len(all_members()) > 300
    keys = [(row["owner"].lower(), row["owner"], row["name"], Version(row["since"])) for row in rows]
    assert keys == sorted(keys)


def test_every_row_has_an_owner_a_type_and_its_evidence() -> None:
    for row in all_members():
        assert row.owner in owners() and row.type, row
        assert row.evidence.startswith(("read ", "documented", "inferred")), row
        assert row.kind != "method" or row.type == "method", row


def test_a_row_says_inferred_where_a_version_was_guessed() -> None:
    """What is there from 1.0 to the end may be read in the files between; a version in between is not in them."""
    for row in all_members():
        begins = row.since not in ("1.0.0", "1.3.0rc21")
        ends = row.until not in (None, "1.3.0rc21")
        owner_begins = any(since == row.since for since, _, _ in owners()[row.owner].imports)
        if (begins and not owner_begins) or ends:
            assert "inferred" in row.evidence, row


def test_the_tags_in_the_evidence_are_explained() -> None:
    used = {word for row in all_members() for word in row.evidence.replace(",", " ").replace(";", " ").split()}
    assert {word for word in used if word.startswith(("1.2rc", "1.3rc-", "2025-"))} <= set(eras())
    assert set(eras()) <= used


def test_rows_of_one_name_do_not_overlap_and_leave_no_gap() -> None:
    pairs = [pair for rows in rows_of_one_name() for pair in pairwise(rows)]
    assert len(pairs) > 10
    assert [pair for pair in pairs if pair[0].until != pair[1].since] == []
    assert [pair for pair in pairs if (pair[0].type, pair[0].default) == (pair[1].type, pair[1].default)] == []


def test_a_row_begins_before_it_ends() -> None:
    ended = [row for row in all_members() if row.until is not None]
    assert len(ended) > 100
    assert [row for row in ended if Version(row.since) >= Version(row.until or "")] == []


def test_defaults_name_owners_and_members_that_are_there() -> None:
    for row in all_members():
        if isinstance(row.default, dict) and "class" in row.default:
            assert row.default["class"] in owners(), row
        if isinstance(row.default, dict) and "enum" in row.default:
            assert has(row.default["enum"], row.default["name"], row.since), row


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_the_engine_backend_is_there_before_1_3_0rc21(version: str) -> None:
    there = Version(version) < Version("1.3.0rc21")
    for owner in ENGINE_BACKEND:
        assert bool(members(owner, version)) is there
        if not there:
            with pytest.raises(KeyError, match=version):
                module_of(owner, version)
    for owner in ("LLM.pytorch", "KvCacheConfig", "QuantConfig", "SamplingParams"):
        assert members(owner, version) and module_of(owner, version)


def test_until_is_exclusive_and_pre_releases_count_as_packaging_orders_them() -> None:
    assert has("BuildConfig", "max_batch_size", "1.3.0rc20.post1")
    assert not has("BuildConfig", "max_batch_size", "1.3.0rc21")
    assert default_of("LLM.pytorch", "max_batch_size", "1.2.1") is None
    assert default_of("LLM.pytorch", "max_batch_size", "1.3.0rc0") == 2048


def test_a_backend_has_the_common_arguments_and_its_own() -> None:
    assert has("LLM.tensorrt", "tensor_parallel_size", "1.2.1") and has("LLM.tensorrt", "build_config", "1.2.1")
    assert has("LLM.pytorch", "stream_interval", "1.2.1") and not has("LLM.pytorch", "build_config", "1.2.1")
    assert has("LLM.autodeploy", "world_size", "1.2.1") and has("LLM.autodeploy", "stream_interval", "1.2.1")
    assert not has("LLM.tensorrt", "stream_interval", "1.2.1")


def test_an_own_row_comes_before_that_of_a_base() -> None:
    assert default_of("LLM.pytorch", "load_format", "1.2.1") == {"enum": "LoadFormat", "name": "AUTO"}
    assert default_of("LLM.tensorrt", "load_format", "1.2.1") == "auto"


def test_a_required_argument_has_no_default() -> None:
    assert default_of("LLM.tensorrt", "model", "1.2.1") is REQUIRED
    assert repr(REQUIRED) == "REQUIRED"


def test_what_is_not_in_the_table_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        members("Nobody", "1.2.1")
    with pytest.raises(KeyError):
        default_of("KvCacheConfig", "nothing", "1.2.1")
    with pytest.raises(KeyError):
        module_of("Nobody", "1.2.1")
