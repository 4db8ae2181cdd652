"""How long GET /metrics takes while streams run, and what it costs the server.

    python -m benchmarks.metrics_page [--streams 256] [--offered 28000] [--scrapes 100]
    python -m benchmarks.metrics_page --text [--models 1,8]

`--text` writes the page in this process, without a load: the CPU time of the first page and of those after it.
Otherwise the scripted executor offers a token for every stream per step. All scrapes use one connection, as Prometheus
does. Client, load, server and engine process share the machine: with fewer than four free cores the scrapes wait for
these.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.load import percentile, post, run_streams, streaming
from benchmarks.servers import cpu_seconds
from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.server.metrics import MetricsPage, ServerCounts
from djl_trtllm.service.lifecycle import Registry, ServedModel
from tests.server.test_metrics import known_statistics
from tests.support.models import scripted_model
from tests.support.server import Server, serving


def scrape(port: int, count: int) -> tuple[list[float], int]:
    """Seconds of each scrape, and the bytes of the last page."""
    seconds, size = [], 0
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        for _ in range(count):
            begin = time.perf_counter()
            page = client.get("/metrics").raise_for_status()
            seconds.append(time.perf_counter() - begin)
            size = len(page.content)
            time.sleep(0.05)
    return seconds, size


def write_pages(models: int, accept: str) -> tuple[float, float]:
    """CPU seconds for the first page of used models, and for a later one: the least of 50."""
    registry, counts = Registry(), ServerCounts()
    for number in range(models):
        model = ServedModel(f"model-{number}", f"/model-{number}")
        model.statistics = known_statistics()
        registry.add(model)
        counts.response(200, "/v1/chat/completions", model.name)
    page = MetricsPage(registry, counts, Histogram())
    seconds = []
    for _ in range(51):
        begin = time.process_time()
        page.reply(accept)
        seconds.append(time.process_time() - begin)
    return seconds[0], min(seconds[1:])


def report(name: str, server: Server, count: int) -> None:
    """Scrape, and print what it took."""
    begin, before = time.perf_counter(), cpu_seconds(server.process)
    seconds, size = scrape(server.port, count)
    share = (cpu_seconds(server.process) - before) / (time.perf_counter() - begin)
    quantiles = ", ".join(f"p{share * 100:g} {percentile(seconds, share) * 1000:.1f} ms" for share in (0.5, 0.9, 0.99))
    print(f"{name}: {quantiles}, longest {max(seconds) * 1000:.1f} ms; {size:,} bytes; server {share:.2f} CPU-s per s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--offered", type=float, default=28_000, help="tokens per second of all streams together")
    parser.add_argument("--scrapes", type=int, default=100)
    parser.add_argument("--text", action="store_true", help="only measure the CPU time of writing the page")
    parser.add_argument("--models", default="1,8", help="used models, with --text")
    arguments = parser.parse_args()
    if arguments.text:
        formats = (("text", ""), ("OpenMetrics", "application/openmetrics-text; version=1.0.0"))
        for models in map(int, arguments.models.split(",")):
            for name, accept in formats:
                first, later = write_pages(models, accept)
                took = f"first page {first * 1000:.2f} ms, later {later * 1000:.2f} ms"
                print(f"{models} used models, {name}: {took} of CPU time")
        return
    with tempfile.TemporaryDirectory() as folder:
        script = {"steps_per_second": arguments.offered / arguments.streams, "max_sequences": arguments.streams}
        model = scripted_model(Path(folder) / "model", script, **{"option.max_rolling_batch_size": arguments.streams})
        with serving(model, Path(folder)) as server:
            tokens = int(arguments.offered / arguments.streams * arguments.scrapes * 0.4) + 100
            body = {"inputs": "the wolf went into the wood", "parameters": {"max_new_tokens": tokens}, "stream": True}
            run_streams(server.port, [post("/invocations", {**body, "parameters": {"max_new_tokens": 2}})])
            report("idle", server, arguments.scrapes)
            with streaming(server, post("/invocations", body), arguments.streams, 30) as load:
                report(f"{arguments.streams} streams, {arguments.offered:,.0f} tok/s", server, arguments.scrapes)
                if not load.is_alive():
                    print("the streams ended before the scrapes did: the figures are too good")


if __name__ == "__main__":
    main()
