"""What OpenTelemetry's traces and metrics say of who sends them."""

from __future__ import annotations

import os

from opentelemetry.sdk.resources import Resource

from djl_trtllm.version import __version__

SERVICE = "djl-trtllm"


def resource() -> Resource:
    """That of the environment, with our name and version if it names no service."""
    own = {"service.name": SERVICE, "service.version": __version__}
    given = Resource.create()
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return given if named else given.merge(Resource(own))
