"""The metrics page."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.batching.statistics import Histogram, Statistics
from djl_trtllm.executor.protocol import Stats
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Origin
from djl_trtllm.server.metrics import MetricsPage, ServerCounts
from djl_trtllm.service import Registry, ServedModel, State
from djl_trtllm.version import __version__
from tests.server.metric_pages import known_statistics, play_request, samples, set_stats
from tests.support.in_process import Hosts, ask, played_model
from tests.support.virtual_time import in_virtual_time

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
    set_stats(story.workers[0], Stats(1, 0.25, 22, 13, 24, 1.5, 60, 15, 0.75))
    set_stats(story.workers[1], Stats(1, 0.5, 12, 23, 14, 2.5, 40, 20, 0.5))
    story.statistics = known_statistics()
    story.workers[1].restarts = 5
    return MetricsPage(registry, counts, stall(0.001, 0.6)), story


@in_virtual_time
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


@in_virtual_time
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
@in_virtual_time
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


def test_any_number_of_formats_leaves_four() -> None:
    page = MetricsPage(Registry(), ServerCounts(), stall())
    for number in range(20):
        page.reply("")
        page.reply(f"application/openmetrics-text; version=1.0.{number}")
    assert len(page._texts) == 4
    assert page.reply().content_type in page._texts


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus has it)")
def test_promtool_accepts_the_page() -> None:
    # Its advice on names is not for those of TensorRT-LLM.
    checked = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=GOLDEN.read_bytes(), capture_output=True, check=False
    )
    advice = [line for line in checked.stderr.decode().splitlines() if not line.startswith("trtllm_")]
    assert (checked.returncode in (0, 3), advice) == (True, []), checked.stderr


@in_virtual_time
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


@in_virtual_time
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


def test_the_page_costs_the_same_whatever_the_load() -> None:
    class Counted(dict[int, RequestRecord]):
        read = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            Counted.read += 1
            return super().__iter__()

        items = values = __iter__

    def lines(statistics: Statistics) -> int:
        registry = Registry()
        story = ServedModel("story", "/story")
        story.statistics = statistics
        registry.add(story)
        return MetricsPage(registry, ServerCounts(), stall()).reply().body.count(b"\n")

    one, many = Statistics("story"), Statistics("story", live=Counted())
    play_request(one)
    for _ in range(1000):
        play_request(many)
        many.request_queued(RequestRecord(Origin(), 100.0, 40, 1))
    assert lines(many) == lines(one) < 800
    assert (len(many.live), Counted.read) == (1000, 0)
