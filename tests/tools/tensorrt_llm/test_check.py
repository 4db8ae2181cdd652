"""The checker of TensorRT-LLM's names: what it sees in a tree of files, what it calls different, its command."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from djl_trtllm.backends.tensorrt_llm.names import KNOWN_VERSIONS, all_members, owners
from tests.fakes.installation import fake_tensorrt_llm
from tests.support.tables import by_table
from tools.tensorrt_llm.check import Finding, Report, Verdict, check_tree, main
from tools.tensorrt_llm.page import names_page

FILES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("tree.yaml").read_text())
"""A small TensorRT-LLM: the text of each file, by its path."""

Make = Callable[..., Report]


def report_on(root: Path, replaced: Mapping[str, str | None], version: str | None) -> Report:
    """The report on FILES, written below `root`, with some of them replaced (None leaves one out)."""
    for name, text in {**FILES, **replaced}.items():
        path = root / "tensorrt_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(textwrap.dedent(text))
    return check_tree(root, version)


def changed(path: str, old: str, new: str) -> dict[str, str | None]:
    """FILES' text of one path with something replaced."""
    assert old in FILES[path]
    return {path: FILES[path].replace(old, new)}


def finding(report: Report, owner: str, name: str) -> Finding:
    (found,) = (item for item in report.findings if (item.owner, item.name) == (owner, name))
    return found


def verdict(report: Report, owner: str, name: str) -> Verdict:
    return finding(report, owner, name).verdict


@pytest.fixture
def look(tmp_path: Path) -> Make:
    """Makes the checker's report on a small TensorRT-LLM, with some of its files replaced."""

    def make(replaced: Mapping[str, str | None] | None = None, version: str | None = None) -> Report:
        return report_on(tmp_path / "unpacked", replaced or {}, version)

    return make


@by_table("owner", "names", apart=True)
def test_dataclasses_models_enums_functions_and_properties_are_read(look: Make, owner: str, names: str) -> None:
    report = look()
    assert report.version == "1.2.1"
    assert {name: verdict(report, owner, name) for name in names.split()} == dict.fromkeys(names.split(), Verdict.EQUAL)


def test_fields_come_from_classes_of_other_modules(look: Make) -> None:
    report = look(
        {
            "sampling_params.py": """
                from dataclasses import dataclass
                from .common.guides import Guides as Common

                @dataclass
                class GuidedDecodingParams(Common):
                    json_object: bool = False
                """,
            "common/guides.py": """
                from dataclasses import dataclass

                @dataclass
                class Guides:
                    regex: str | None = None
                    json_object: bool = True
                """,
        }
    )
    assert verdict(report, "GuidedDecodingParams", "regex") is Verdict.EQUAL
    assert verdict(report, "GuidedDecodingParams", "json_object") is Verdict.EQUAL
    assert verdict(report, "GuidedDecodingParams", "grammar") is Verdict.DIFFERENT


def test_constructors_arguments_come_from_the_class_that_declares_them(look: Make) -> None:
    arguments = """
        from .utils import StrictBaseModel

        class BaseLlmArgs(StrictBaseModel):
            model: str
            tensor_parallel_size: int = 1

        class TrtLlmArgs(BaseLlmArgs):
            fast_build: bool = False
        """
    engine = "from tensorrt_llm.llmapi.llm import _TrtLLM as LLM\n"
    trt = "class _TrtLLM:\n    def save(self, engine_dir): ...\n"
    report = look(
        {"llmapi/llm_args.py": arguments, "_tensorrt_engine/__init__.py": engine, "llmapi/llm.py": trt},
    )
    for name in ("model", "tensor_parallel_size", "fast_build", "save"):
        assert verdict(report, "LLM.tensorrt", name) is Verdict.EQUAL, name
    assert verdict(report, "LLM.tensorrt", "build_config") is Verdict.DIFFERENT


# -- nothing is claimed that was not seen ------------------------------------------------------------------------------


def test_what_a_missing_file_has_is_not_seen(look: Make) -> None:
    report = look({"plugin/plugin.py": None, "plugin/__init__.py": None})
    found = finding(report, "PluginConfig", "")
    assert (found.verdict, found.text) == (Verdict.UNSEEN, "no file of the module tensorrt_llm.plugin")
    assert verdict(report, "PluginConfig", "tokens_per_block") is Verdict.UNSEEN
    report = look({"plugin/plugin.py": None})
    assert "tensorrt_llm.plugin.plugin, of which there is no file" in finding(report, "PluginConfig", "").text


def test_a_name_that_a_class_out_of_sight_may_have_is_not_seen(look: Make) -> None:
    guides = """
        from dataclasses import dataclass
        from tensorrt_llm.guides import Guides

        @dataclass
        class GuidedDecodingParams(Guides):
            grammar: str | None = None
        """
    report = look({"sampling_params.py": guides})
    assert verdict(report, "GuidedDecodingParams", "regex") is Verdict.UNSEEN
    assert verdict(report, "GuidedDecodingParams", "grammar") is Verdict.EQUAL


def test_a_method_that_a_class_out_of_sight_may_have_is_not_seen(look: Make) -> None:
    report = look(changed("llmapi/llm.py", "class BaseLLM:", "from ..base import Base\n\nclass Other:"))
    assert finding(report, "generate_async", "").verdict is Verdict.DIFFERENT
    hidden = "from ..base import BaseLLM\n\nclass LLM(BaseLLM):\n    pass\n"
    report = look({"llmapi/llm.py": hidden})
    assert finding(report, "generate_async", "").verdict is Verdict.UNSEEN
    assert verdict(report, "LLM", "shutdown") is Verdict.UNSEEN


def test_a_name_may_come_from_any_module_that_is_imported_whole(look: Make) -> None:
    report = look({"executor/__init__.py": "from .gone import *\nfrom .errors import *\n"})
    assert verdict(report, "CppExecutorError", "RuntimeError") is Verdict.EQUAL
    report = look({"executor/__init__.py": "from .gone import *\nfrom .utils import *\n"})
    assert finding(report, "CppExecutorError", "").verdict is Verdict.UNSEEN


@pytest.mark.parametrize(
    ("owner", "name"), [("LoraConfig", "lora_target_modules"), ("SpeculativeDecodingMode", "NONE")]
)
def test_a_default_that_only_running_code_tells_is_not_called_equal(look: Make, owner: str, name: str) -> None:
    assert verdict(look(), owner, name) is Verdict.UNREAD


# -- what differs ---


@by_table("path", "old", "new", "owner", "name", "text", apart=True)
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


@by_table("arguments", "message", apart=True)
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
    "LLM": "generates asynchronously alone",
    "RequestOutput": "has what the server reads, and the steps of its asynchronous iteration",
    "CompletionOutput": "its text is not made",
    "generate_async": "takes any arguments and checks them against the table",
    "encode": "takes any arguments and checks them against the table",
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
