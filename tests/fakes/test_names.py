"""Names: each test holds one rule of TensorRT-LLM, and names the section of the facts that it is from.

Rules without a section come from TensorRT-LLM's source, whose file is named.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.tensorrt_llm.names import KNOWN_VERSIONS, members, owners

from .observing import Observer, call


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_signatures_are_those_of_the_names_table(observe: Observer, version: str) -> None:
    seen, unknown_types = observe(call("signatures"), call("types_in_the_table"), version=version)
    checked = 0
    for owner, names in seen.items():
        kinds = ("argument", "field", "attribute", "enum")
        assert names == sorted(n for n, m in members(owner, version).items() if m.kind in kinds), owner
        checked += len(names)
    present = {owner for owner in owners() if members(owner, version)}
    assert present - set(seen) <= {"generate_async", "LLM", "BaseLlmArgs", "RequestOutput", "LLM.autodeploy"}
    assert checked > 200
    assert unknown_types == []


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1", "1.3.0"])
def test_results_and_llms_have_what_the_table_says(observe: Observer, tiny_stories: Path, version: str) -> None:
    assert observe(call("members_of_results", model=tiny_stories), version=version) == []


@pytest.mark.parametrize(
    ("version", "there"), [("1.0.0", True), ("1.2.1", True), ("1.3.0rc20", True), ("1.3.0rc21", False)]
)
def test_the_engine_backend_is_gone_from_1_3_0rc21(observe: Observer, version: str, there: bool) -> None:
    """§1.2: as files and as imports, with BuildConfig and the tensorrt distribution."""
    seen = observe(call("modules"), version=version)
    assert seen["files"] is there
    assert (seen["import"] is True) is there
    assert seen["BuildConfig"] is there
    assert ("PackageNotFoundError" in seen["tensorrt"]) is not there
    assert seen["version"] == seen["distribution"] == version
