"""What the checker sees in a tree of files, and that it claims no more."""

from __future__ import annotations

import pytest

from tests.tools.tensorrt_llm.trees import Make, changed, finding, verdict
from tools.tensorrt_llm.check import Verdict


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
