from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from djl_trtllm.api.base import RequestParser
from djl_trtllm.config import Options


class PlayedTokenizer:
    """As much of a tokenizer as the dialect reads."""

    end_ids = frozenset({2, 7})
    vocab_size = 100


@dataclass
class PlayedModel:
    """A `ModelContext`."""

    options: Options = field(default_factory=Options)
    name: str = "story"
    tokenizer: Any = field(default_factory=PlayedTokenizer)
    custom: RequestParser | None = None
    max_seq_len: int = 64
