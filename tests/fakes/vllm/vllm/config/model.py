from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 1024


@dataclass
class ModelConfig:
    max_model_len: int
    dtype: str = "torch.float32"

    def get_vocab_size(self) -> int:
        return VOCABULARY
