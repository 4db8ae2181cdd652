"""What asks OpenTelemetry for traces and metrics."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from djl_trtllm.errors import ConfigError
from djl_trtllm.telemetry.otlp import GRPC, HTTP, Signal, asked_by, is_disabled, open_signal

SIGNALS: list[Signal] = ["traces", "metrics"]


@pytest.fixture(params=SIGNALS)
def signal(request: pytest.FixtureRequest) -> Signal:
    found: Signal = request.param
    return found


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": " True "}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "no"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_NAME_ENDPOINT": "http://x"}, "OTEL_EXPORTER_OTLP_NAME_ENDPOINT"),
        ({"OTEL_NAME_EXPORTER": " OTLP "}, "OTEL_NAME_EXPORTER"),
        ({"OTEL_NAME_EXPORTER": "None", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, None),
        ({"OTEL_LOGS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://x"}, None),
    ],
)
def test_the_endpoint_of_all_signals_or_the_variables_of_one_ask_for_it(
    signal: Signal, environ: Mapping[str, str], asked: str | None
) -> None:
    own = {name.replace("NAME", signal.upper()): value for name, value in environ.items()}
    assert asked_by(signal, own) == (asked and asked.replace("NAME", signal.upper()))


def test_another_exporter_is_an_error(signal: Signal) -> None:
    name = f"OTEL_{signal.upper()}_EXPORTER"
    with pytest.raises(ConfigError) as caught:
        asked_by(signal, {name: "zipkin"})
    assert caught.value.problems == (f"{name}=zipkin (environment): expected otlp or none",)


def test_opentelemetry_is_off_as_a_whole_by_its_own_variable() -> None:
    assert is_disabled({"OTEL_SDK_DISABLED": "TRUE"})
    assert not is_disabled({"OTEL_SDK_DISABLED": "1"})
    assert not is_disabled({})


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({}, HTTP),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": ""}, HTTP),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": " GRPC "}, GRPC),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_NAME_PROTOCOL": "http/protobuf"}, HTTP),
        ({"OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "grpc"}, HTTP),
    ],
)
def test_the_protocol_is_that_of_the_signal_else_that_of_all(
    signal: Signal, environ: Mapping[str, str], protocol: str
) -> None:
    own = {name.replace("NAME", signal.upper()): value for name, value in environ.items()}
    assert open_signal(signal, "VARIABLE", own, lambda given: [given]) == [protocol]


def test_a_protocol_that_is_not_known_is_an_error_with_the_variable(signal: Signal) -> None:
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL"):
        with pytest.raises(ConfigError) as caught:
            open_signal(signal, "VARIABLE", {name: "http/json"}, str)
        assert caught.value.problems == (f"{name}=http/json (environment): expected http/protobuf or grpc",)


@pytest.mark.parametrize(
    ("protocol", "package"), [(HTTP, "djl-trtllm[otel]"), (GRPC, "opentelemetry-exporter-otlp-proto-grpc")]
)
def test_a_package_that_is_missing_is_an_error_with_its_name(signal: Signal, protocol: str, package: str) -> None:
    def make(protocol: str) -> None:
        raise ImportError("no module")

    with pytest.raises(ConfigError) as caught:
        open_signal(signal, "VARIABLE", {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}, make)
    assert caught.value.problems == (
        f"VARIABLE asks for {signal}, and OpenTelemetry's packages are not installed (no module): pip install "
        f"'{package}', or unset it; OTEL_SDK_DISABLED=true switches {signal} off",
    )


def test_what_opentelemetry_refuses_is_an_error_with_its_reason(signal: Signal) -> None:
    def make(protocol: str) -> None:
        raise ValueError("an odd interval")

    with pytest.raises(ConfigError) as caught:
        open_signal(signal, "VARIABLE", {}, make)
    problem = f"VARIABLE asks for {signal}, and OpenTelemetry refuses its variables: an odd interval"
    assert caught.value.problems == (problem,)
