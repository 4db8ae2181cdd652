"""The checker against small packages written here, and against the fake: what it sees, and that it claims no more."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from djl_trtllm.config.tensorrt_llm_check import Finding, Report, Verdict, check_tree, main
from djl_trtllm.config.tensorrt_llm_names import KNOWN_VERSIONS
from djl_trtllm.config.tensorrt_llm_seen import same_type
from tests.fakes import fake_tensorrt_llm

# Its own files; an argument replaces one (None leaves it out).
FILES = {
    "__init__.py": "from .llmapi import LLM\nfrom .sampling_params import SamplingParams\n",
    "version.py": '__version__ = "1.2.1"\n',
    "llmapi/__init__.py": """
        from ..executor import RequestError
        from ..sampling_params import GuidedDecodingParams, SamplingParams
        from .llm import LLM
        from .llm_args import (BatchingType, CalibConfig, CudaGraphConfig, DynamicBatchConfig, KvCacheConfig,
                               SchedulerConfig)
        """,
    "llmapi/utils.py": """
        from pydantic import BaseModel

        class StrictBaseModel(BaseModel):
            model_config = {"extra": "forbid"}
        """,
    "llmapi/llm_args.py": """
        from typing import Annotated, List, Optional
        from pydantic import Field as PydanticField
        from pydantic import NonNegativeInt
        from strenum import StrEnum
        from .utils import StrictBaseModel

        def Field(default=..., *, status=None, **kwargs):
            return PydanticField(default, **kwargs)

        class BatchingType(StrEnum):
            STATIC = "STATIC"
            INFLIGHT = "INFLIGHT"

        class CapacitySchedulerPolicy(StrEnum):
            GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"

        class CudaGraphConfig(StrictBaseModel):
            batch_sizes: Optional[List[int]] = Field(default=None, description="...")
            max_batch_size: NonNegativeInt = Field(0, description="...")
            enable_padding: bool = Field(default=False)

        class DynamicBatchConfig(StrictBaseModel):
            enable_batch_size_tuning: bool = Field(description="...")
            enable_max_num_tokens_tuning: bool = Field(...)
            dynamic_batch_moving_average_window: int

        class SchedulerConfig(StrictBaseModel):
            capacity_scheduler_policy: CapacitySchedulerPolicy = Field(
                default=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)
            context_chunking_policy: Optional["ContextChunkingPolicy"] = None
            dynamic_batch_config: DynamicBatchConfig | None = None

        class PeftCacheConfig(StrictBaseModel):
            host_cache_size: int = Field(default=1024**3)

        class LoraConfig(StrictBaseModel):
            lora_dir: List[str] = Field(default_factory=list)
            trtllm_modules_to_hf_modules: dict = Field(default_factory=dict)
            lora_target_modules: List[str] = Field(default_factory=lambda: ["attn_q"])
        """,
    "llmapi/llm.py": """
        class BaseLLM:
            def __init__(self, model, **kwargs):
                self.workspace_dir = None

            def generate_async(self, inputs: "PromptInputs", sampling_params: "Optional[SamplingParams]" = None,
                               *, streaming: bool = False) -> "RequestOutput":
                ...

            @property
            def tokenizer(self): ...

        class _TorchLLM(BaseLLM):
            def shutdown(self): ...

        class LLM(_TorchLLM):
            pass
        """,
    "sampling_params.py": """
        from dataclasses import dataclass, field
        from typing import List, Optional, Union

        @dataclass(slots=True, kw_only=True)
        class GuidedDecodingParams:
            json: Optional[Union[str, "BaseModel", dict]] = None
            regex: Optional[str] = None
            grammar: Optional[str] = None
            json_object: bool = False
            structural_tag: Optional[str] = None

        @dataclass(slots=True, kw_only=True)
        class SamplingParams:
            max_tokens: int = 32
            stop: Optional[Union[str, List[str]]] = None
            _stop_word_ids: Optional[List[List[int]]] = field(default=None, init=False, repr=False)
        """,
    "executor/__init__.py": """
        from .errors import *
        try:
            from .utils import RequestError
        except ImportError:
            RequestError = None
        """,
    "executor/utils.py": "class RequestError(RuntimeError):\n    pass\n",
    "executor/errors.py": "class CppExecutorError(RuntimeError):\n    pass\n",
    "quantization/mode.py": """
        from enum import auto
        from strenum import StrEnum

        class QuantAlgo(StrEnum):
            FP8 = auto()
        """,
    "models/modeling_utils.py": """
        from enum import IntFlag, auto

        class SpeculativeDecodingMode(IntFlag):
            NONE = auto()
        """,
    "plugin/__init__.py": "from .plugin import PluginConfig\n",
    "plugin/plugin.py": """
        from dataclasses import dataclass, field
        from typing import Optional

        class PluginConfigMeta(type):
            pass

        @dataclass(slots=True)
        class PluginConfig(metaclass=PluginConfigMeta):
            _dtype: str = field(default="float16", init=False)
            _gemm_plugin: Optional[str] = field(default=None, init=False)
            _tokens_per_block: int = field(default=32, init=False)
        """,
}

Make = Callable[..., Report]


@pytest.fixture
def look(tmp_path: Path) -> Make:
    """The report on FILES, with some of them replaced."""

    def make(replaced: Mapping[str, str | None] | None = None, version: str | None = None) -> Report:
        root = tmp_path / "unpacked"
        for name, text in {**FILES, **(replaced or {})}.items():
            path = root / "tensorrt_llm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is not None:
                path.write_text(textwrap.dedent(text))
        return check_tree(root, version)

    return make


def finding(report: Report, owner: str, name: str) -> Finding:
    (found,) = (item for item in report.findings if (item.owner, item.name) == (owner, name))
    return found


def verdict(report: Report, owner: str, name: str) -> Verdict:
    return finding(report, owner, name).verdict


# -- what is read from a tree ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        ("GuidedDecodingParams", "json regex grammar json_object structural_tag"),
        ("SamplingParams", "max_tokens stop"),
        ("CudaGraphConfig", "batch_sizes max_batch_size enable_padding"),
        (
            "DynamicBatchConfig",
            "enable_batch_size_tuning enable_max_num_tokens_tuning dynamic_batch_moving_average_window",
        ),
        ("SchedulerConfig", "capacity_scheduler_policy context_chunking_policy dynamic_batch_config"),
        ("PeftCacheConfig", "host_cache_size"),
        ("LoraConfig", "lora_dir trtllm_modules_to_hf_modules"),
        ("BatchingType", "STATIC INFLIGHT"),
        ("generate_async", "inputs sampling_params streaming"),
        ("LLM", "generate_async shutdown tokenizer"),
        ("RequestError", "RuntimeError"),
        ("CppExecutorError", "RuntimeError"),
        ("PluginConfig", "dtype gemm_plugin tokens_per_block"),
    ],
)
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


# -- differences -------------------------------------------------------------------------------------------------------


def changed(path: str, old: str, new: str) -> dict[str, str | None]:
    assert old in FILES[path]
    return {path: FILES[path].replace(old, new)}


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


def test_a_type_that_is_written_differently_is_told_and_is_no_difference(look: Make) -> None:
    report = look(changed("sampling_params.py", "max_tokens: int", "max_tokens: Optional[int]"))
    found = finding(report, "SamplingParams", "max_tokens")
    assert (found.verdict, found.types) == (Verdict.EQUAL, ("int", "Optional[int]"))
    assert any("type written differently: max_tokens" in line for line in report.lines())


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


# -- nothing is claimed that was not seen ------------------------------------------------------------------------------


def test_a_missing_file_is_not_seen(look: Make) -> None:
    report = look({"plugin/plugin.py": None, "plugin/__init__.py": None})
    found = finding(report, "PluginConfig", "")
    assert (found.verdict, found.text) == (Verdict.UNSEEN, "no file of the module tensorrt_llm.plugin")
    assert verdict(report, "PluginConfig", "tokens_per_block") is Verdict.UNSEEN


def test_a_name_that_comes_from_a_missing_file_is_not_seen(look: Make) -> None:
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
    report = look(changed("llmapi/llm.py", "class BaseLLM:", "from ..base import Base\n\n        class Other:"))
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
        (["--tree", "."], "name it with --version"),
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


# -- an installed package ----------------------------------------------------------------------------------------------

# Where the fake is not like the real one, and need not be.
SIMPLER_IN_THE_FAKE = {
    "generate_async": "takes any arguments and checks them against the table",
    "LoadFormat": "its members' values are text",
    "SpeculativeDecodingMode": "its members' values are text",
}


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_the_fake_has_what_the_table_says(version: str, tmp_path: Path) -> None:
    """The same comparison as in a container: import, signatures, fields."""
    process = subprocess.run(
        [sys.executable, "-m", "djl_trtllm.config.tensorrt_llm_check", "--installed"],
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
