"""Models with known figures, and a page of their metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.executor.protocol import Stats
from djl_trtllm.request import FinishReason, Origin, SequenceResult
from djl_trtllm.server.metrics import MetricsPage
from djl_trtllm.service import ModelService


def play_request(statistics: Statistics, reason: FinishReason = FinishReason.LENGTH) -> RequestRecord:
    """A request of 40 prompt and 11 generated tokens, that waits 1 s, has its first token after 3 s and ends at 8 s."""
    record = RequestRecord(Origin(), 100.0, 40, 1)
    statistics.request_queued(record)
    statistics.request_started(record, 101.0)
    record.first_token_at, record.last_token_at, record.generated_tokens = 103.0, 107.0, 11
    statistics.time_to_first_token.observe(3.0)
    statistics.inter_token_latency.observe(0.4, 10)
    result = SequenceResult(reason, 11, None, None)
    statistics.sequence_ended(result)
    statistics.request_ended(record, result, 108.0)
    return record


def known_statistics() -> Statistics:
    """A count of its own for each."""
    statistics = Statistics("story")
    play_request(statistics)
    statistics.requests, statistics.resumed = 11, 10
    statistics.finished = Counter({FinishReason.END_TOKEN: 12, FinishReason.LENGTH: 13})
    statistics.ended_requests = Counter(
        {FinishReason.END_TOKEN: 2, FinishReason.STOP: 3, FinishReason.LENGTH: 4, FinishReason.CANCELLED: 5}
    )
    statistics.prompt_tokens, statistics.reused_prompt_tokens, statistics.generated_tokens = 14, 15, 16
    return statistics


def set_stats(service: ModelService, stats: Stats) -> None:
    """What the engine said last."""
    assert service.batch is not None
    service.batch.engine_stats = stats


def samples(page: MetricsPage) -> Mapping[str, float]:
    """The samples of a page, with their labels as they are written."""
    found = {}
    for family in text_string_to_metric_families(page.reply().body.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
