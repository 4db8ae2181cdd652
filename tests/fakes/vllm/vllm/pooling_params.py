from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class PoolingParams:
    task: str | None = None
    use_activation: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
