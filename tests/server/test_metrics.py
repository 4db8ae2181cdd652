"""The metrics page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from djl_trtllm.batching.statistics import Histogram, Statistics
from djl_trtllm.executor.protocol import Stats
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.server.metrics import MetricsPage, ServerCounts
from djl_trtllm.service import ModelService, Registry, ServedModel, State
from tests.support.in_process import Hosts, ask, played_model
from tests.support.virtual_time import in_virtual_time

GOLDEN = Path(__file__).with_name("metrics.txt")


def observed(*values: float, bounds: tuple[float, ...] = (0.5, 1.0)) -> Histogram:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return histogram


def statistics() -> Statistics:
    """A count of its own for each."""
    return Statistics(
        requests=11,
        resumed=10,
        finished=Counter({FinishReason.END_TOKEN: 12, FinishReason.LENGTH: 13}),
        prompt_tokens=14,
        reused_prompt_tokens=15,
        generated_tokens=16,
        time_to_first_token=observed(0.1, 0.7, 0.8, 7),
        inter_token_latency=observed(0.2),
        queue_time=observed(0.3, 0.3),
        request_time=observed(9),
    )


def stats(service: ModelService, stats: Stats) -> None:
    assert service.batch is not None
    service.batch.engine_stats = stats


@in_virtual_time
async def test_the_page_is_what_dashboards_were_made_for(hosts: Hosts, tokenizer: Tokenizer) -> None:
    registry, counts, stall = Registry(), ServerCounts(), observed(0.001, 0.6)
    page = MetricsPage(registry, counts, stall)
    for name in ("story", "fable"):
        registry.add(ServedModel(name, f"/{name}"))
    for status in (503, 200, 200):
        counts.response(status)
    for call in ("OK", "NOT_FOUND", "OK"):
        counts.grpc_call(call)
    story = registry.models["story"]
    await story.load(lambda: played_model(tokenizer, max_rolling_batch_size=2), 2)
    for worker, sequences in zip(story.workers, (3, 4), strict=True):
        for _ in range(sequences):
            await ask(worker)
    stats(story.workers[0], Stats(1, 0.25, 22, 13, 24, 1.5, 26, 17, 0.75))
    stats(story.workers[1], Stats(1, 0.5, 12, 23, 14, 2.5, 16, 27, 0.5))
    story.statistics = statistics()
    story.workers[1].restarts = 5
    reply = page.reply()
    assert (reply.status, reply.content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert reply.body.decode() == GOLDEN.read_text()
    await story.close()


def values(page: MetricsPage) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page.reply().body.decode())
        for sample in family.samples
    }


@in_virtual_time
async def test_the_page_shows_what_is_now(hosts: Hosts, tokenizer: Tokenizer) -> None:
    registry, counts = Registry(), ServerCounts()
    page = MetricsPage(registry, counts, observed())
    assert "djl_trtllm_ready" not in values(page)
    story = ServedModel("story", "/story")
    registry.add(story)
    await story.load(lambda: played_model(tokenizer))
    assert values(page)["djl_trtllm_ready"] == 1
    story.workers[0].state = State.DRAINING
    assert values(page)["djl_trtllm_ready"] == 0
    registry.remove(story)
    assert "djl_trtllm_ready" not in values(page)
    await story.close()
