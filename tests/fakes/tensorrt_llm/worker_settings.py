"""What a worker needs of the LLM's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerSettings:
    """Plain data.

    `eos` is what the model emits at its end; `guided_ids` what it emits when it is guided. `overlap`: PyExecutor
    prepares an iteration while another one runs.
    """

    backend: str
    engine_dir: str | None
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int | None
    max_beam_width: int
    torch_sampler: bool
    chunked_prefill: bool
    overlap: bool
    policy: str
    tokens_per_block: int
    kv_blocks: int
    block_reuse: bool
    stream_interval: int
    iteration_stats: bool
    stats_max_iterations: int
    guided: str
    guided_ids: list[int]
    lora: bool
    max_lora_rank: int
    hidden_size: int | None
    vocab_size: int | None
    eos: int | None
    script: dict[str, Any]

    @property
    def pytorch(self) -> bool:
        return self.backend != "tensorrt"
