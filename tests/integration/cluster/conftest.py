"""A Ray cluster of one node, with the bundled model and a scripted one on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import scripted_model
from tests.support.ray_cluster import RayCluster, needs_ray

ROOMY = {"max_rolling_batch_size": 64, "max_input_len": 2560, "max_tokens_in_paged_kv_cache": 65536}
"""The options of the fixture `server`."""
SCRIPTED = "/scripted"


@pytest.fixture(scope="package")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """The bundled model at /, and two replicas of a scripted one below /scripted. Sessions stay at a replica."""
    needs_ray()
    scripted = scripted_model(tmp_path_factory.mktemp("models") / "scripted", {"steps_per_second": 100})
    with RayCluster(environ={"RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)"}) as started:
        started.deploy(model, options=ROOMY, direct=True)
        started.deploy(scripted, app="scripted", route=SCRIPTED, replicas=2, direct=True)
        yield started
