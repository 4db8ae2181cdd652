from __future__ import annotations

from dataclasses import dataclass

from vllm.config.pooler import PoolerConfig

__all__ = ["PoolerConfig", "StructuredOutputsConfig"]


@dataclass
class StructuredOutputsConfig:
    backend: str = "auto"
