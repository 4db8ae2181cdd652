"""The semantic conventions' metrics, with OpenTelemetry's own reader."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from djl_trtllm.request import FinishReason
from djl_trtllm.telemetry import ServedRequest, otel_metrics
from djl_trtllm.telemetry.otel_metrics import DURATION, EACH, FIRST, USAGE, OtelMetrics
from djl_trtllm.version import __version__
from tests.telemetry.requests import BEGAN, served, state

ASKED = {
    "gen_ai.provider.name": "djl-trtllm",
    "gen_ai.operation.name": "text_completion",
    "gen_ai.request.model": "story",
    "gen_ai.response.model": "story",
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end 12 seconds after they began."""
    monkeypatch.setattr(otel_metrics, "time", SimpleNamespace(monotonic=lambda: BEGAN + 12))


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
def test_only_what_generates_is_measured(changes: dict[str, Any]) -> None:
    assert measured(served(**changes)) == {}


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
def test_the_exporter_is_that_of_the_protocol(monkeypatch: pytest.MonkeyPatch, protocol: str, module: str) -> None:
    """The package for gRPC is not among those of the tests."""
    made = []
    for each in ("http", "grpc"):
        fake = SimpleNamespace(OTLPMetricExporter=lambda each=each: made.append(each))
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{each}.metric_exporter", fake)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", SimpleNamespace())
    monkeypatch.setattr(otel_metrics, "PeriodicExportingMetricReader", lambda exporter: "reader")
    assert str(otel_metrics.periodic_reader(protocol)) == "reader"
    assert made == [module]
