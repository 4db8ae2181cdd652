from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from djl_trtllm.config import load
from djl_trtllm.errors import ConfigError
from djl_trtllm.telemetry import spans
from djl_trtllm.telemetry.traces import Traces, open_traces


def opened(**environ: str) -> Traces | None:
    found = open_traces(load(None, environ).options, environ)
    if found is not None:
        found.close()
    return found


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "True"},
        {"SERVING_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nothing_is_traced_unless_it_is_asked_for(environ: dict[str, str]) -> None:
    assert opened(**environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"},
        {"OTEL_TRACES_EXPORTER": "OTLP"},
        {"SERVING_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"},
        {"SERVING_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_an_endpoint_or_an_exporter_asks_for_traces(environ: dict[str, str]) -> None:
    assert opened(**environ) is not None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER=jaeger (environment): expected otlp or none"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/json (environment): expected http/protobuf or grpc",
        ),
        ({"SERVING_OTLP_TRACES_ENDPOINT": "collector:4318"}, "expected an address such as http://localhost:4318"),
        (
            {"SERVING_OTLP_TRACES_ENDPOINT": "http://:4318"},
            "SERVING_OTLP_TRACES_ENDPOINT=http://:4318 (environment): expected an address",
        ),
        ({"SERVING_OTLP_TRACES_ENDPOINT": "http://x:port"}, "expected an address such as http://localhost:4318"),
        (
            {"SERVING_OTLP_TRACES_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            "pip install 'opentelemetry-exporter-otlp-proto-grpc', or unset it; OTEL_SDK_DISABLED=true",
        ),
    ],
)
def test_what_cannot_be_done_is_an_error_that_names_the_setting(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(**environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, None),
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("http://collector/own", "http://collector/own"),
    ],
)
def test_traces_go_to_the_endpoint_of_the_option_else_to_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str | None
) -> None:
    asked: list[str | None] = []

    def exporter(endpoint: str | None) -> SpanExporter:
        asked.append(endpoint)
        return InMemorySpanExporter()

    monkeypatch.setattr(spans, "http_exporter", exporter)
    opened(**({"OTEL_TRACES_EXPORTER": "otlp"} if given is None else {"SERVING_OTLP_TRACES_ENDPOINT": given}))
    assert asked == [used]


def test_a_model_cannot_send_traces_somewhere(tmp_path: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {}, arguments=["otlp_traces_endpoint=http://attacker"])
    assert "SERVING_OTLP_TRACES_ENDPOINT" in str(caught.value)


def without_opentelemetry(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program where OpenTelemetry is not installed."""
    head = "import sys\nsys.modules['opentelemetry'] = None\n"
    return subprocess.run([sys.executable, "-c", head + program], capture_output=True, text=True, check=False)


def test_nothing_of_opentelemetry_is_imported_unless_traces_are_asked_for() -> None:
    program = (
        "from djl_trtllm.config import load\n"
        "from djl_trtllm.server import app\n"
        "from djl_trtllm.telemetry import Telemetry\n"
        "Telemetry.open(load(None, {}).options, {}).close()\n"
    )
    result = without_opentelemetry(program)
    assert result.returncode == 0, result.stderr


def test_packages_that_are_missing_are_asked_for_by_the_option_too() -> None:
    program = (
        "from djl_trtllm.config import load\n"
        "from djl_trtllm.telemetry import Telemetry\n"
        "environ = {'SERVING_OTLP_TRACES_ENDPOINT': 'http://x'}\n"
        "Telemetry.open(load(None, environ).options, environ)\n"
    )
    error = without_opentelemetry(program).stderr.splitlines()[-1]
    assert "SERVING_OTLP_TRACES_ENDPOINT asks for traces" in error


def test_traces_without_the_packages_are_an_error_that_names_the_extra() -> None:
    program = (
        "from djl_trtllm.config import load\n"
        "from djl_trtllm.telemetry import Telemetry\n"
        "Telemetry.open(load(None, {}).options, {'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://x'})\n"
    )
    error = without_opentelemetry(program).stderr.splitlines()[-1]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT asks for traces" in error
    assert "pip install 'djl-trtllm[otel]'" in error
