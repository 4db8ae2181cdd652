from __future__ import annotations

from djl_trtllm.bench.display import describe
from djl_trtllm.bench.load import Load, Progress
from tests.bench.test_report import figures


def test_the_line_has_what_runs_now() -> None:
    progress = Progress(Load(concurrency=3), figures(3, 10, failed=2), 3, 1234.5, 2.4, "measuring")
    expected = "3 clients: measuring 2 s, 3 in flight, 1 done, 1,234 tok/s, TTFT p50 250 ms, 2 failed"
    assert describe(progress) == expected
