"""The checker against small packages written here: what it calls different, and what its command prints."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from djl_trtllm.backends.tensorrt_llm.names import KNOWN_VERSIONS, all_members, owners
from tests.fakes.installation import fake_tensorrt_llm
from tests.tools.tensorrt_llm.trees import Make, changed, finding
from tools.tensorrt_llm.check import Verdict, main
from tools.tensorrt_llm.page import names_page


@pytest.mark.parametrize(
    ("path", "old", "new", "owner", "name", "text"),
    [
        (
            "sampling_params.py",
            "max_tokens: int = 32",
            "max_tokens: int = 64",
            "SamplingParams",
            "max_tokens",
            "default 32 in the table, 64 there",
        ),
        (
            "sampling_params.py",
            "regex: Optional[str] = None\n",
            "pattern: Optional[str] = None\n",
            "GuidedDecodingParams",
            "regex",
            "not there",
        ),
        (
            "llmapi/llm_args.py",
            'STATIC = "STATIC"',
            'STATIC = "static"',
            "BatchingType",
            "STATIC",
            "default 'STATIC' in the table, 'static' there",
        ),
        (
            "llmapi/llm_args.py",
            "enable_batch_size_tuning: bool = Field(description",
            "enable_batch_size_tuning: bool = Field(True, description",
            "DynamicBatchConfig",
            "enable_batch_size_tuning",
            "default REQUIRED in the table, True there",
        ),
        (
            "llmapi/llm.py",
            "*, streaming: bool = False",
            "streaming=0",
            "generate_async",
            "streaming",
            "default False in the table, 0 there",
        ),
        (
            "llmapi/llm.py",
            "def shutdown(self): ...",
            "shutdown: bool = True",
            "LLM",
            "shutdown",
            "method in the table, argument there",
        ),
        (
            "executor/utils.py",
            "RequestError(RuntimeError)",
            "RequestError(ValueError)",
            "RequestError",
            "RuntimeError",
            "does not derive from RuntimeError",
        ),
    ],
)
def test_what_is_otherwise_there_differs(
    look: Make, path: str, old: str, new: str, owner: str, name: str, text: str
) -> None:
    report = look(changed(path, old, new))
    found = finding(report, owner, name)
    assert (found.verdict, found.text) == (Verdict.DIFFERENT, text)
    assert any(name in line and text in line for line in report.lines())


def test_an_owner_that_its_module_lacks_differs(look: Make) -> None:
    report = look(changed("plugin/__init__.py", "PluginConfig", "PluginConfigMeta"))
    assert finding(report, "PluginConfig", "").text == "not there: tensorrt_llm.plugin has no PluginConfig"


def test_a_name_that_the_table_has_in_other_versions_alone_differs(look: Make) -> None:
    """The table has TrtLlmArgs' save before 1.3.0rc21, and priority from 1.3.0rc18 on."""
    report = look(changed("llmapi/llm.py", "streaming: bool", "priority: float = 0.5, streaming: bool"))
    assert "the table has it from 1.3.0rc18 on" in finding(report, "generate_async", "priority").text
    later = look(version="1.3.0")
    assert "before 1.3.0rc21" in finding(later, "PluginConfig", "").text


def test_a_type_that_is_written_differently_is_reported_and_is_no_difference(look: Make) -> None:
    report = look(changed("sampling_params.py", "max_tokens: int", "max_tokens: Optional[int]"))
    found = finding(report, "SamplingParams", "max_tokens")
    assert (found.verdict, found.types) == (Verdict.EQUAL, ("int", "Optional[int]"))
    assert any("type written differently: max_tokens" in line for line in report.lines())


def test_every_row_is_in_the_report_once(look: Make) -> None:
    report = look()
    keys = [(found.owner, found.name) for found in report.findings]
    assert len(keys) == len(set(keys))
    sums = list(report.lines())[-1]
    assert sum(int(part.split()[0]) for part in sums.split(", ") if part[0].isdigit()) == len(keys)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_status_is_1_where_something_differs(
    look: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    look()
    assert main(["--tree", str(tmp_path / "unpacked")]) == 1
    assert "different: KvCacheConfig: not there" in capsys.readouterr().out


def test_the_status_is_0_where_what_was_seen_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    assert main(["--tree", str(package), "--version", "1.2.1"]) == 0
    printed = capsys.readouterr().out
    assert "not seen: KvCacheConfig: no file of the module tensorrt_llm.llmapi" in printed
    assert printed.splitlines()[-1].startswith("0 equal, 0 different")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tree", "."], "give it with --version"),
        (["--tree", "nothing"], "nothing has no folder tensorrt_llm"),
        (["--installed"], "tensorrt_llm"),
    ],
)
def test_what_cannot_be_looked_at_is_said(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments == ["--installed"] and importlib.util.find_spec("tensorrt_llm") is not None:
        pytest.skip("TensorRT-LLM is installed")
    (tmp_path / "tensorrt_llm").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# -- the checker against an installed package: the fake ----------------------------------------------------------------

# Where the fake is not like the real one, and need not be.
SIMPLER_IN_THE_FAKE = {
    "generate_async": "takes any arguments and checks them against the table",
    "LoadFormat": "its members' values are text",
    "SpeculativeDecodingMode": "its members' values are text",
}


@pytest.mark.parametrize(
    "version",
    [pytest.param(version, marks=[] if version == "1.2.1" else [pytest.mark.slow]) for version in KNOWN_VERSIONS],
)
def test_the_fake_has_what_the_table_says(version: str, tmp_path: Path) -> None:
    """The same comparison as in a container: import, signatures, fields."""
    process = subprocess.run(
        [sys.executable, "-m", "tools.tensorrt_llm.check", "--installed"],
        env={**os.environ, **fake_tensorrt_llm(tmp_path, version=version)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"TensorRT-LLM {version}, imported from {tmp_path}" in process.stdout, process.stderr
    owner, different = "", set()
    for line in process.stdout.splitlines():
        owner = line.partition(":")[0] if not line.startswith(" ") else owner
        if line.startswith("  different"):
            different.add(owner)
    assert different <= SIMPLER_IN_THE_FAKE.keys(), process.stdout
    assert process.stdout.splitlines()[-1].endswith(" 0 not seen")


def test_the_page_has_every_owner_and_name() -> None:
    page = names_page()
    assert [name for name in owners() if f"\n## {name}\n" not in page] == []
    assert page.count("\n| `") == len(all_members())
