"""A vLLM as far as the executor uses it: its next token is the last one's successor.

`python -m tools.vllm.names` compares its classes with the table, and the table with an installed vLLM.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

__version__ = "0.32.0"
__all__ = ["EngineArgs", "PoolingParams", "SamplingParams"]


class EngineArgs(SimpleNamespace):
    """All arguments are taken."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
