from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from djl_trtllm.request import FinishReason
from djl_trtllm.telemetry import ServedRequest
from djl_trtllm.telemetry.otel import DURATION, EACH, FIRST, USAGE, OtelMetrics, SpanTraces, exporter
from djl_trtllm.version import __version__
from tests.support.tables import by_rows, by_table
from tests.telemetry.requests import BEGAN, TRACEPARENT, served, state

NOW = 112.0
WALL = 1_795_000_000.0


class Collected(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 112 seconds after the start of the monotonic clock."""
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: NOW)
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(NOW * 1e9))
    monkeypatch.setattr(time, "time_ns", lambda: int((WALL + NOW) * 1e9))


def traced(request: ServedRequest) -> dict[str, ReadableSpan]:
    """The spans of a request, by name."""
    collected = Collected()
    traces = SpanTraces(collected)
    traces.record(request)
    traces.close()
    return {span.name: span for span in collected.spans}


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9 - WALL, span.end_time / 1e9 - WALL


def attributes(request: ServedRequest) -> dict[str, object]:
    return dict(traced(request)["llm_request"].attributes or {})


def test_a_request_is_a_span_of_the_server_and_its_phases_are_children() -> None:
    spans = traced(served(state()))
    assert {name: times(span) for name, span in spans.items()} == {
        "llm_request": (BEGAN, NOW),
        "receive": (100.0, 101.0),
        "queue": (101.0, 103.0),
        "prefill": (103.0, 106.0),
        "decode": (106.0, 110.0),
    }
    root = spans.pop("llm_request")
    assert (root.kind, root.parent) == (SpanKind.SERVER, None)
    assert root.context is not None
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in spans.values())


@by_table("changes", "phases")
def test_the_phase_in_which_a_request_ended_early_is_the_last(
    changes: dict[str, None], phases: dict[str, float]
) -> None:
    spans = traced(served(state(**changes)))
    del spans["llm_request"]
    assert {name: times(span)[1] for name, span in spans.items()} == phases


def test_the_parent_is_that_of_the_request() -> None:
    span = traced(served(headers={"traceparent": TRACEPARENT, "tracestate": "a=b"}))["llm_request"]
    assert span.parent is not None
    assert span.context is not None
    assert f"00-{span.context.trace_id:032x}-{span.parent.span_id:016x}-01" == TRACEPARENT
    assert span.context.trace_state.get("a") == "b"


@pytest.mark.parametrize("header", ["", "00-0-0-01", "x" * 5000, TRACEPARENT.replace("-01", "-01-extra")])
def test_a_header_that_is_none_begins_a_trace(header: str) -> None:
    assert traced(served(headers={"traceparent": header}))["llm_request"].parent is None


def test_a_caller_that_does_not_sample_is_followed() -> None:
    assert traced(served(state(), headers={"traceparent": TRACEPARENT[:-1] + "0"})) == {}


def test_the_attributes_have_the_names_of_the_conventions_and_of_other_servers() -> None:
    assert attributes(served(state())) == {
        "gen_ai.provider.name": "djl-trtllm",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": "r-1",
        "gen_ai.request.model": "story",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 1,
        "gen_ai.response.model": "story",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.latency.time_in_queue": 2.0,
        "gen_ai.latency.time_to_first_token": 6.0,
        "gen_ai.latency.e2e": 12.0,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/invocations",
        "djl_trtllm.dialect": "lmi",
    }


def test_a_span_has_its_client() -> None:
    assert attributes(served(state(), client="web-app"))["djl_trtllm.client"] == "web-app"


def test_a_refusal_has_its_error_and_no_phases() -> None:
    spans = traced(served(status=429, error="OverloadedError", asked=None))
    assert list(spans) == ["llm_request"]
    found = spans["llm_request"].attributes or {}
    assert (found["error.type"], found["http.response.status_code"]) == ("OverloadedError", 429)
    assert "gen_ai.operation.name" not in found


def test_a_call_of_grpc_has_its_method_and_status() -> None:
    found = attributes(served(status="NOT_FOUND", method="gRPC", path="ModelInfer"))
    assert (found["rpc.method"], found["rpc.response.status_code"]) == ("ModelInfer", "NOT_FOUND")
    assert "http.request.method" not in found


@by_rows(
    ("status", "code"),
    [
        (200, StatusCode.UNSET),
        (429, StatusCode.UNSET),
        (500, StatusCode.ERROR),
        ("OK", StatusCode.UNSET),
        ("INVALID_ARGUMENT", StatusCode.UNSET),
        ("INTERNAL", StatusCode.ERROR),
    ],
)
def test_a_span_fails_where_the_server_is_at_fault(status: int | str, code: StatusCode) -> None:
    assert traced(served(status=status))["llm_request"].status.status_code is code


def test_a_response_that_fails_when_it_has_begun_is_a_failed_span() -> None:
    span = traced(served(state(error="GenerationError"), status=200))["llm_request"]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "GenerationError")
    assert (span.attributes or {})["error.type"] == "GenerationError"


def test_the_end_sends_what_waits() -> None:
    exporter = Collected()
    traces = SpanTraces(exporter)
    traces.record(served())
    traces.close()
    assert [span.name for span in exporter.spans] == ["llm_request"]


def test_the_end_waits_for_what_is_sent() -> None:
    class Slow(Collected):
        ended = False

        def shutdown(self) -> None:
            threading.Event().wait(0.1)
            self.ended = True

    exporter = Slow()
    SpanTraces(exporter).close()
    assert exporter.ended


def test_what_a_client_names_is_no_longer_than_in_the_log() -> None:
    found = attributes(served(status=404, model="x" * 1_000_000, path="/" + "y" * 5000))
    assert found["gen_ai.request.model"] == "x" * 197 + "..."
    assert found["url.path"] == "/" + "y" * 196 + "..."


def test_the_log_gets_the_ids_of_the_trace() -> None:
    traces = SpanTraces(Collected())
    found = traces.record(served(headers={"traceparent": TRACEPARENT}))
    assert found["trace_id"] == TRACEPARENT.split("-")[1]
    assert len(found["span_id"]) == 16


@by_table("environ", "name")
def test_the_service_has_the_name_that_the_environment_gives_it(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], name: str
) -> None:
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    resource = traced(served())["llm_request"].resource
    assert resource.attributes["service.name"] == name
    assert ("service.version" in resource.attributes) == (name == "djl-trtllm")
    assert resource.attributes.get("a") == ("b" if "a=b" in str(environ) else None)


# The semantic conventions' metrics, with OpenTelemetry's own reader.


ASKED = {
    "gen_ai.provider.name": "djl-trtllm",
    "gen_ai.operation.name": "text_completion",
    "gen_ai.request.model": "story",
    "gen_ai.response.model": "story",
}


def measured(*requests: ServedRequest) -> dict[str, Any]:
    """The metrics by name."""
    reader = InMemoryMetricReader()
    metrics = OtelMetrics(reader)
    for request in requests:
        metrics.record(request)
    data = reader.get_metrics_data()
    metrics.close()
    if data is None:
        return {}
    return {metric.name: metric for scope in data.resource_metrics[0].scope_metrics for metric in scope.metrics}


def sums(metric: Any) -> list[tuple[dict[str, Any], int, float]]:
    """Attributes, count and sum of each series."""
    return [(dict(point.attributes), point.count, point.sum) for point in metric.data.data_points]


def test_a_request_has_the_metrics_of_the_conventions() -> None:
    found = measured(served(state()), served(state()))
    assert {name: metric.unit for name, metric in found.items()} == {
        DURATION: "s",
        FIRST: "s",
        EACH: "s",
        USAGE: "{token}",
    }
    assert sums(found[DURATION]) == [(ASKED, 2, 24.0)]
    assert sums(found[FIRST]) == [(ASKED, 2, 12.0)]
    assert sums(found[EACH]) == [(ASKED, 2, 2.0)]
    assert sums(found[USAGE]) == [
        ({**ASKED, "gen_ai.token.type": "input"}, 2, 14),
        ({**ASKED, "gen_ai.token.type": "output"}, 2, 10),
    ]


def test_the_buckets_are_those_of_the_conventions() -> None:
    bounds = {name: metric.data.data_points[0].explicit_bounds for name, metric in measured(served(state())).items()}
    assert bounds[DURATION] == (
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    )
    assert bounds[FIRST][:3] == (0.001, 0.005, 0.01)
    assert bounds[FIRST][-1] == 10.0
    assert bounds[EACH][:2] == (0.01, 0.025)
    assert bounds[EACH][-1] == 2.5
    assert bounds[USAGE][:3] == (1, 4, 16)
    assert bounds[USAGE][-1] == 67_108_864


def test_each_prompt_of_a_request_has_its_own_time_per_token() -> None:
    found = measured(served(state(), state(last_token_at=114.0), state(generated_tokens=1)))
    assert sums(found[EACH]) == [(ASKED, 2, 3.0)]
    assert sums(found[FIRST]) == [(ASKED, 1, 6.0)]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (served(state(reason=FinishReason.ERROR, error="GenerationError"), status=500), "GenerationError"),
        (served(state(), error="ExecutorDiedError"), "ExecutorDiedError"),
        (served(state(reason=FinishReason.CANCELLED), status=499), "499"),
    ],
)
def test_a_request_that_failed_has_its_error_and_no_latency(request_: ServedRequest, error: str) -> None:
    found = measured(request_)
    assert sums(found[DURATION]) == [({**ASKED, "error.type": error}, 1, 12.0)]
    assert set(found) == {DURATION, USAGE}


def test_a_refusal_has_a_duration_only() -> None:
    found = measured(served(status=503, error="OverloadedError"))
    assert sums(found[DURATION]) == [({**ASKED, "error.type": "OverloadedError"}, 1, 12.0)]
    assert set(found) == {DURATION}


def test_any_number_of_names_that_no_model_has_is_one_series() -> None:
    found = measured(*(served(status=404, model=f"made-up-{number}", asked=None) for number in range(50)))
    assert sums(found[DURATION]) == [({"gen_ai.provider.name": "djl-trtllm", "error.type": "404"}, 50, 600.0)]


def test_a_request_that_ends_before_its_first_token_has_no_latency() -> None:
    found = measured(served(state(first_token_at=None, last_token_at=None, generated_tokens=0)))
    assert set(found) == {DURATION, USAGE}


@pytest.mark.parametrize("changes", [{"quiet": True}, {"reads": True}, {"dialect": ""}])
def test_only_what_generates_is_traced_and_measured(changes: dict[str, Any]) -> None:
    assert traced(served(**changes)) == measured(served(**changes)) == {}


def test_who_sends_is_named() -> None:
    reader = InMemoryMetricReader()
    metrics = OtelMetrics(reader)
    metrics.record(served(state()))
    data = reader.get_metrics_data()
    assert data is not None
    attributes = data.resource_metrics[0].resource.attributes
    assert (attributes["service.name"], attributes["service.version"]) == ("djl-trtllm", __version__)
    metrics.close()


@pytest.mark.parametrize(("protocol", "module"), [("http/protobuf", "http"), ("grpc", "grpc")])
@pytest.mark.parametrize(("kind", "name"), [("metric", "OTLPMetricExporter"), ("trace", "OTLPSpanExporter")])
def test_the_exporter_is_that_of_the_protocol(
    monkeypatch: pytest.MonkeyPatch, protocol: str, module: str, kind: Literal["trace", "metric"], name: str
) -> None:
    """The package for gRPC is not among those of the tests."""
    for each in ("http", "grpc"):
        fake = SimpleNamespace(**{name: lambda endpoint, each=each: (each, endpoint)})
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{each}", SimpleNamespace())
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{each}.{kind}_exporter", fake)
    assert exporter(kind, protocol, "http://x/own") == (module, "http://x/own")
