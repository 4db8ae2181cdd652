"""The metrics page."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from djl_trtllm.batching.statistics import Histogram, RequestRecord, Statistics
from djl_trtllm.executor.protocol import Stats
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, RequestOrigin, SequenceResult
from djl_trtllm.server.metrics import MetricsPage, ServerCounts
from djl_trtllm.service.lifecycle import ModelService, Registry, ServedModel, State
from djl_trtllm.version import __version__
from tests.support.in_process import Hosts, ask, played_model

# Models with known figures, and a page of their metrics.


def play_request(statistics: Statistics, reason: FinishReason = FinishReason.LENGTH) -> RequestRecord:
    """A request of 40 prompt and 11 generated tokens, that waits 1 s, has its first token after 3 s and ends at 8 s."""
    record = RequestRecord(RequestOrigin(), 100.0, 40, 1)
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
    statistics.images, statistics.image_tokens, statistics.image_bytes = 21, 22, 23
    statistics.refused_images.update(size=24)
    statistics.accepted_tokens = 9
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


GOLDEN = Path(__file__).with_name("metrics.txt")
PROMTOOL = shutil.which("promtool")
OPENMETRICS = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def stall(*values: float) -> Histogram:
    histogram = Histogram((0.5, 1.0))
    for value in values:
        histogram.observe(value)
    return histogram


async def full_page(tokenizer: Tokenizer) -> tuple[MetricsPage, ServedModel]:
    """The page of a model that was used and of one that is not loaded."""
    registry, counts = Registry(), ServerCounts()
    for name in ("story", "fable"):
        registry.add(ServedModel(name, f"/{name}"))
    for status in (503, 200, 200):
        counts.response(status, "/v1/chat/completions", "story")
    counts.response(404)
    for call in ("OK", "NOT_FOUND", "OK"):
        counts.grpc_call(call)
    story = registry.models["story"]
    await story.load(lambda: played_model(tokenizer, max_rolling_batch_size=2), 2)
    for worker, sequences in zip(story.workers, (3, 4), strict=True):
        for _ in range(sequences):
            await ask(worker)
    set_stats(story.workers[0], Stats(1, 0.25, 22, 13, 24, 1.5, 60, 15, 0.75, 3, 5, 1.5, 30, 10))
    set_stats(story.workers[1], Stats(1, 0.5, 12, 23, 14, 2.5, 40, 20, 0.5, 1, 7, 2.25, 12, 4))
    for worker in story.workers:
        assert worker.batch is not None
        worker.batch.speculates = True
    story.statistics = known_statistics()
    story.workers[1].restarts = 5
    return MetricsPage(registry, counts, stall(0.001, 0.6)), story


async def test_the_page_is_what_dashboards_were_made_for(hosts: Hosts, tokenizer: Tokenizer) -> None:
    page, story = await full_page(tokenizer)
    reply = page.reply()
    assert (reply.status, reply.content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    text = re.sub(r"(?m)^(# \w+ )?process_.*\n", "", reply.body.decode())
    text = text.replace(platform.python_version(), "PYTHON").replace(__version__, "VERSION")
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    await story.close()


async def test_the_process_is_on_the_page(hosts: Hosts, tokenizer: Tokenizer) -> None:
    found = samples(MetricsPage(Registry(), ServerCounts(), stall()))
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_max_fds"):
        assert found[name] > 0


@pytest.mark.parametrize(
    ("accept", "content_type", "parse"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8", text_string_to_metric_families),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8", text_string_to_metric_families),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0; charset=utf-8", parse_openmetrics),
    ],
)
async def test_the_page_has_the_format_that_the_client_accepts(
    hosts: Hosts,
    tokenizer: Tokenizer,
    accept: str,
    content_type: str,
    parse: Callable[[str], Iterable[Metric]],
) -> None:
    page, story = await full_page(tokenizer)
    reply = page.reply(accept)
    assert reply.content_type.startswith(content_type)
    families = [family.name for family in parse(reply.body.decode())]
    assert {"djl_trtllm_running", "djl_trtllm_generated_tokens", "trtllm_num_requests_running"} <= set(families)
    assert len(families) == len(set(families))
    await story.close()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus has it)")
def test_promtool_accepts_the_page() -> None:
    # Its advice on names is not for those of TensorRT-LLM and vLLM.
    checked = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=GOLDEN.read_bytes(), capture_output=True, check=False
    )
    advice = [line for line in checked.stderr.decode().splitlines() if not line.startswith(("trtllm_", "vllm:"))]
    assert (checked.returncode in (0, 3), advice) == (True, []), checked.stderr


async def test_the_page_shows_what_is_now(hosts: Hosts, tokenizer: Tokenizer) -> None:
    registry = Registry()
    page = MetricsPage(registry, ServerCounts(), stall())
    ready = 'djl_trtllm_ready{model="story"}'
    assert ready not in samples(page)
    story = ServedModel("story", "/story")
    registry.add(story)
    await story.load(lambda: played_model(tokenizer))
    assert samples(page)[ready] == 1
    story.workers[0].state = State.DRAINING
    assert samples(page)[ready] == 0
    registry.remove(story)
    assert ready not in samples(page)
    await story.close()


async def test_what_is_not_known_is_absent(hosts: Hosts, tokenizer: Tokenizer) -> None:
    registry = Registry()
    page = MetricsPage(registry, ServerCounts(), stall())
    story = ServedModel("story", "/story")
    registry.add(story)
    of_an_engine = ("memory", "_engine_", "kv_cache", "iteration", "max_", "model_info")
    assert not [name for name in samples(page) if "story" in name and any(part in name for part in of_an_engine)]
    await story.load(lambda: played_model(tokenizer))
    assert not [name for name in samples(page) if "kv_cache" in name or "iteration" in name]
    # Nothing has a distribution before there was a request.
    assert not [name for name in samples(page) if "_bucket" in name and "story" in name]
    play_request(story.statistics)
    assert samples(page)['djl_trtllm_request_time_seconds_count{model="story"}'] == 1
    await story.close()


def test_any_number_of_unknown_paths_and_gone_models_leave_one_line() -> None:
    registry, counts = Registry(), ServerCounts()
    page = MetricsPage(registry, counts, stall())
    for number in range(1000):
        counts.response(404)
        counts.response(200, "/invocations", f"gone-{number}")
    registry.add(ServedModel("story", "/story"))
    counts.response(200, "/invocations", "story")
    lines = [name for name in samples(page) if name.startswith("djl_trtllm_http_responses_total")]
    assert len(lines) == len(counts.responses) == 2
    assert samples(page)['djl_trtllm_http_responses_total{model="",route="unknown",status="404"}'] == 1000


# The metrics of models under TensorRT-LLM's names.


def test_the_endpoint_picker_of_llm_d_finds_its_gauges() -> None:
    """What it reads of a pod with the label llm-d.ai/engine-type: trtllm-serve (`defaultEngineConfigs` of the
    core-metrics-extractor in github.com/llm-d/llm-d-router)."""
    text = GOLDEN.read_text()
    for name in (
        "trtllm_num_requests_waiting",
        "trtllm_num_requests_running",
        "trtllm_kv_cache_utilization",
        "trtllm_kv_cache_tokens_per_block",
        "trtllm_kv_cache_max_blocks",
    ):
        assert f"# TYPE {name} gauge" in text
        assert f'\n{name}{{engine_type="scripted",model_name="story"}} ' in text


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


# docs/metrics.md lists the metrics that the page has.


PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
MARK = "UPDATE_GOLDEN=1 -->\n"


def table() -> str:
    """A row for each metric of the page of `test_metrics.py`, which has all."""
    text = GOLDEN.read_text()
    rows = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for name, help_text in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE):
        kind = re.findall(rf"^# TYPE {name} (\w+)$", text, re.MULTILINE)[0]
        sample = re.findall(rf"^{name}(?:_bucket)?(?:\{{(.*)\}})? ", text, re.MULTILINE)[0]
        labels = [label for label in re.findall(r'(\w+)="', sample) if label != "le"]
        rows.append(f"| `{name}` | {kind} | {', '.join(labels)} | {help_text} |")
    rows.append(
        "| `process_*` | gauge, counter | | CPU time, memory, file descriptors and start of the server's process |"
    )
    return "\n".join(rows) + "\n"


def test_the_table_has_what_the_page_has() -> None:
    before, mark, found = PAGE.read_text().partition(MARK)
    assert mark
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{mark}\n{table()}")
        return
    assert found.strip() == table().strip()
