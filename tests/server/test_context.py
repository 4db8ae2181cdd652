from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, TooManyRequestsError
from djl_trtllm.server.context import ServerContext


def test_bodies_and_clients_have_the_bounds_of_the_options() -> None:
    context = ServerContext(Options(max_body_memory=1000, max_requests_per_client=1))
    assert context.bodies.limit == 1000
    context.clients.enter("a")
    with pytest.raises(TooManyRequestsError):
        context.clients.enter("a")


def test_what_the_options_say_of_access_is_read_when_it_is_opened(tmp_path: Path) -> None:
    assert not ServerContext.open(Options()).access.keys
    with pytest.raises(ConfigError, match="nowhere"):
        ServerContext.open(Options(api_keys_file=tmp_path / "nowhere"))
