"""Whether OpenTelemetry sends traces or metrics, as its environment variables say. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from djl_trtllm.errors import ConfigError

Signal = Literal["traces", "metrics"]
T = TypeVar("T")

HTTP, GRPC = "http/protobuf", "grpc"
_PACKAGES = {HTTP: "djl-trtllm[otel]", GRPC: "opentelemetry-exporter-otlp-proto-grpc"}
_DISABLED = "OTEL_SDK_DISABLED"


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry is off as a whole."""
    return environ.get(_DISABLED, "").strip().lower() == "true"


def asked_by(signal: Signal, environ: Mapping[str, str]) -> str | None:
    """The variable that asks for a signal, None if none does. Raises ConfigError."""
    if is_disabled(environ):
        return None
    name = f"OTEL_{signal.upper()}_EXPORTER"
    exporter = environ.get(name, "").strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise ConfigError([f"{name}={exporter} (environment): expected otlp or none"])
    if exporter:
        return name if exporter == "otlp" else None
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((name for name in endpoints if environ.get(name)), None)


def open_signal(signal: Signal, asked: str, environ: Mapping[str, str], make: Callable[[str], T]) -> T:
    """What `make` makes for the protocol that the environment names. `asked` is the setting that asks for it.

    Raises ConfigError if the protocol is not known, packages are missing or OpenTelemetry refuses its variables.
    """
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((name for name in names if environ.get(name)), None)
    protocol = HTTP if name is None else environ[name].strip().lower()
    if protocol not in _PACKAGES:
        raise ConfigError([f"{name}={protocol} (environment): expected {HTTP} or {GRPC}"])
    try:
        return make(protocol)
    except ImportError as error:
        raise ConfigError(
            [
                f"{asked} asks for {signal}, and OpenTelemetry's packages are not installed ({error}): pip install "
                f"'{_PACKAGES[protocol]}', or unset it; {_DISABLED}=true switches {signal} off"
            ]
        ) from None
    except ValueError as error:
        raise ConfigError([f"{asked} asks for {signal}, and OpenTelemetry refuses its variables: {error}"]) from None
