"""A store in S3, and a hub on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3 import s3, store
from tests.support.stub_http import Hub, hub_server

__all__ = ["s3", "store"]


@pytest.fixture(scope="session")
def served() -> Iterator[tuple[Hub, str]]:
    """A hub and its address."""
    hub = Hub({})
    with hub_server(hub) as endpoint:
        yield hub, endpoint


@pytest.fixture
def hub(served: tuple[Hub, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub without models, which the hub's library takes for huggingface.co; nobody is logged in."""
    from huggingface_hub import constants, file_download

    hub, endpoint = served
    fresh = Hub({})
    for name in fresh.__dataclass_fields__:
        setattr(hub, name, getattr(fresh, name))
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    for module in (constants, file_download):  # before 1.0 the second one has a copy
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    return hub
