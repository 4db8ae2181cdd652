from __future__ import annotations

import pytest

from djl_trtllm.telemetry.resource import resource
from djl_trtllm.version import __version__


@pytest.fixture(autouse=True)
def _no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)


def test_it_has_our_name_and_version_if_the_environment_names_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    given = resource().attributes
    assert (given["service.name"], given["service.version"]) == ("djl-trtllm", __version__)
    assert given["deployment.environment"] == "test"


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SERVICE_NAME", "stories"), ("OTEL_RESOURCE_ATTRIBUTES", "service.name=stories")]
)
def test_a_name_of_the_environment_is_the_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    given = resource().attributes
    assert given["service.name"] == "stories"
    assert "service.version" not in given
