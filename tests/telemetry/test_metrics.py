"""When OpenTelemetry's metrics are sent."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from djl_trtllm.errors import ConfigError
from djl_trtllm.telemetry import otel_metrics
from djl_trtllm.telemetry.metrics import open_metrics


@pytest.fixture(autouse=True)
def protocols(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that were opened; nothing is sent."""
    found: list[str] = []

    def reader(protocol: str) -> InMemoryMetricReader:
        found.append(protocol)
        return InMemoryMetricReader()

    monkeypatch.setattr(otel_metrics, "periodic_reader", reader)
    return found


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_METRICS_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"},
        {"SERVING_OTLP_TRACES_ENDPOINT": "http://x"},
        {"OTEL_TRACES_EXPORTER": "otlp"},
    ],
)
def test_nothing_is_measured_unless_it_is_asked_for(environ: dict[str, str], protocols: list[str]) -> None:
    assert open_metrics(environ) is None
    assert protocols == []


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x/v1/metrics"}, "http/protobuf"),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"}, "grpc"),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "http/protobuf"),
    ],
)
def test_an_endpoint_or_an_exporter_asks_for_metrics(
    environ: dict[str, str], protocol: str, protocols: list[str]
) -> None:
    found = open_metrics(environ)
    assert found is not None
    assert protocols == [protocol]
    found.close()


def test_what_cannot_be_done_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"OTEL_METRICS_EXPORTER=prometheus .*expected otlp or none"):
        open_metrics({"OTEL_METRICS_EXPORTER": "prometheus"})
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL=http/json .*expected http/protobuf"):
        open_metrics({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"})


def test_metrics_without_the_packages_are_an_error_that_names_the_extra() -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from djl_trtllm.telemetry.metrics import open_metrics\n"
        "assert open_metrics({}) is None\n"
        "open_metrics({'OTEL_METRICS_EXPORTER': 'otlp'})\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    error = result.stderr.splitlines()[-1]
    assert "OTEL_METRICS_EXPORTER asks for metrics" in error
    assert "pip install 'djl-trtllm[otel]', or unset it; OTEL_SDK_DISABLED=true switches metrics off" in error
