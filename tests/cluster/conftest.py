from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


class PlayedServe:
    """Ray, and its Serve with one application `default`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None
        deployment = SimpleNamespace(replica_states={"RUNNING": 2, "STARTING": 1})
        default = SimpleNamespace(
            status=SimpleNamespace(value="RUNNING"), message="no room", deployments={"a": deployment, "b": deployment}
        )
        self.applications: dict[str, Any] = {"default": default}
        monkeypatch.setattr("ray.init", self._noted("init", SimpleNamespace(address_info={"gcs_address": "here"})))
        monkeypatch.setattr("ray.shutdown", self._noted("ray.shutdown"))
        for name in ("start", "run", "delete", "shutdown"):
            monkeypatch.setattr(f"ray.serve.{name}", self._noted(name))
        monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications=self.applications))
        monkeypatch.setattr("djl_trtllm.cluster.control.build", lambda arguments: arguments)

    def _noted(self, name: str, result: object = None) -> Any:
        def call(*_: Any, **__: Any) -> object:
            self.calls.append(name)
            if name == "run" and self.error is not None:
                raise self.error
            return result

        return call


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> PlayedServe:
    return PlayedServe(monkeypatch)
