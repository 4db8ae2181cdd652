from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.spec_decode.metrics import SpecDecodingStats


@dataclass
class PrefillStats:
    num_cached_tokens: int = 0


@dataclass
class RequestSpecDecodeMetrics:
    num_draft_tokens: int = 0


@dataclass
class PrefixCacheStats:
    queries: int = 0
    hits: int = 0


@dataclass
class SchedulerStats:
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    spec_decoding_stats: SpecDecodingStats | None = None
