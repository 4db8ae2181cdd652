"""A small TensorRT-LLM written to a directory, and the checker's report on it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.tensorrt_llm.check import Finding, Report, Verdict, check_tree

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
