"""The metrics of models under TensorRT-LLM's names."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from djl_trtllm.executor.protocol import Stats
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.metrics import MetricsPage, ServerCounts
from djl_trtllm.service import Registry, ServedModel
from tests.server.metric_pages import known_statistics, samples, set_stats
from tests.server.test_metrics import stall
from tests.support.in_process import Hosts, ask, played_model
from tests.support.virtual_time import in_virtual_time

# What llm-d's endpoint picker reads of a pod with the label llm-d.ai/engine-type: trtllm-serve (`defaultEngineConfigs`
# of the core-metrics-extractor in github.com/llm-d/llm-d-router; docs/plugin-metric-protocol.md has their meaning).
ENDPOINT_PICKER = {
    "queuedRequestsSpec": "trtllm_num_requests_waiting",
    "runningRequestsSpec": "trtllm_num_requests_running",
    "kvUsageSpec": "trtllm_kv_cache_utilization",
    "cacheBlockSizeSpec": "trtllm_kv_cache_tokens_per_block",
    "cacheNumBlocksSpec": "trtllm_kv_cache_max_blocks",
}

# TensorRT-LLM's buckets (tensorrt_llm/metrics/collector.py at 050f80def8df).
REQUEST = (
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0 +Inf"
)
BUCKETS = {
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "time_to_first_token_seconds": (
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0 "
        "+Inf"
    ),
    "time_per_output_token_seconds": (
        "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 +Inf"
    ),
    "request_prefill_time_seconds": (
        "0.001 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1.0 2.5 5.0 10.0 20.0 40.0 80.0 160.0 640.0 2560.0 +Inf"
    ),
}
SECONDS = {
    "e2e_request_latency_seconds": 8,
    "request_queue_time_seconds": 1,
    "request_decode_time_seconds": 4,
    "request_inference_time_seconds": 6,
    "time_to_first_token_seconds": 3,
    "time_per_output_token_seconds": 0.4,
    "request_prefill_time_seconds": 2,
}


def used_page() -> MetricsPage:
    """A page of a model with known statistics."""
    registry, counts = Registry(), ServerCounts()
    story = ServedModel("story", "/story")
    story.statistics = known_statistics()
    registry.add(story)
    for status in (200, 399, 400, 404, 429, 429, 500):
        counts.response(status, "/invocations", "story")
    counts.response(429, "/invocations")
    return MetricsPage(registry, counts, stall())


@in_virtual_time
async def test_an_endpoint_picker_finds_its_gauges(hosts: Hosts, tokenizer: Tokenizer) -> None:
    registry = Registry()
    story = ServedModel("story", "/story")
    registry.add(story)
    await story.load(lambda: played_model(tokenizer, max_rolling_batch_size=2, script={"kv_blocks": 64}))
    page = MetricsPage(registry, ServerCounts(), stall())
    for _ in range(3):
        await ask(story.workers[0])
    set_stats(story.workers[0], Stats(2, 0.25, kv_blocks=64, kv_blocks_used=16))
    families = {family.name: family for family in text_string_to_metric_families(page.reply().body.decode())}
    found = {}
    for spec, name in ENDPOINT_PICKER.items():
        assert families[name].type == "gauge"
        (sample,) = families[name].samples
        assert sample.labels == {"model_name": "story", "engine_type": "scripted"}
        found[spec] = sample.value
    assert found == {
        "queuedRequestsSpec": 1,
        "runningRequestsSpec": 2,
        "kvUsageSpec": 0.25,
        "cacheBlockSizeSpec": 32,
        "cacheNumBlocksSpec": 64,
    }
    assert samples(page)['trtllm_kv_cache_free_blocks{engine_type="scripted",model_name="story"}'] == 48
    await story.close()


@pytest.mark.parametrize("name", BUCKETS)
def test_histograms_have_tensorrt_llms_buckets(name: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(used_page().reply().body.decode())}
    found = {sample.labels.get("le"): sample.value for sample in families[f"trtllm_{name}"].samples}
    assert " ".join(bound for bound in found if bound is not None) == BUCKETS[name]
    labels = '{engine_type="unknown",model_name="story"}'
    values = samples(used_page())
    assert values[f"trtllm_{name}_count{labels}"] == 1
    assert values[f"trtllm_{name}_sum{labels}"] == pytest.approx(SECONDS[name])


def test_successes_and_errors_are_counted_as_there() -> None:
    values = samples(used_page())

    def by(name: str, label: str) -> dict[str, float]:
        found = {key: value for key, value in values.items() if key.startswith(name + "{")}
        return {key.partition(label + '="')[2].partition('"')[0]: value for key, value in found.items()}

    assert by("trtllm_request_success_total", "finished_reason") == {"stop": 5, "length": 4}
    assert by("trtllm_request_error_total", "http_code") == {"400": 1, "404": 1, "429": 2, "500": 1}
    labels = '{engine_type="unknown",model_name="story"}'
    assert values[f"trtllm_num_requests_completed_total{labels}"] == 14
    assert values[f"trtllm_generation_tokens_total{labels}"] == 16
