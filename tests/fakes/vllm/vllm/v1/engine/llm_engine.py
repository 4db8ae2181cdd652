from __future__ import annotations

from types import SimpleNamespace

from vllm import EngineArgs
from vllm.config.model import ModelConfig
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import BLOCKS, InprocClient
from vllm.v1.engine.input_processor import InputProcessor


class LLMEngine:
    def __init__(self, arguments: EngineArgs) -> None:
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=BLOCKS, block_size=16),
            model_config=ModelConfig(arguments.max_model_len),
            device_config=SimpleNamespace(device_type="cpu"),
            speculative_config=getattr(arguments, "speculative_config", None),
            lora_config=object() if getattr(arguments, "enable_lora", False) else None,
        )
        self.input_processor = InputProcessor(arguments.max_model_len)
        self.engine_core = InprocClient(
            arguments.max_num_seqs,
            self.vllm_config.speculative_config is not None,
            getattr(arguments, "per_request_spec_decode_metrics", "none") != "none",
        )

    def reset_mm_cache(self) -> None:
        self.input_processor.renderer.cached.clear()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: UsageContext) -> LLMEngine:
        assert usage_context is UsageContext.OPENAI_API_SERVER
        return cls(engine_args)
