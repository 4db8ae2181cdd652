from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PoolerConfig:
    seq_pooling_type: str | None = None
