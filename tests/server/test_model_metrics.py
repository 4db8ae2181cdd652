"""The metrics of models under our own names; `test_metrics.py` has the whole page."""

from __future__ import annotations

from djl_trtllm.server.metrics import MetricsPage, ServerCounts
from djl_trtllm.service import Registry, ServedModel
from tests.server.metric_pages import known_statistics, samples
from tests.server.test_metrics import stall


def test_finish_reasons_are_counted_by_sequence_and_by_request() -> None:
    registry = Registry()
    story = ServedModel("story", "/story")
    story.statistics = known_statistics()
    registry.add(story)
    found = samples(MetricsPage(registry, ServerCounts(), stall()))
    assert found['djl_trtllm_finished_total{model="story",reason="length"}'] == 13
    assert found['djl_trtllm_ended_requests_total{model="story",reason="length"}'] == 4
    assert found['djl_trtllm_ended_requests_total{model="story",reason="stop_sequence"}'] == 3
