"""Adapters of `user_config` are those of all replicas, without a restart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.adapters import write_adapter
from tests.support.client import lmi
from tests.support.models import tensorrt_llm_model
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

APP, ROUTE = "adapting", "/adapting"
REPLICAS = 2


class Adapting:
    """Two replicas behind a gateway, of a model with folders of adapters that are not registered."""

    def __init__(self, cluster: RayCluster, model: str, environ: dict[str, str]) -> None:
        self.cluster = cluster
        self._application = {
            "name": APP,
            "route_prefix": ROUTE,
            "import_path": "djl_trtllm.cluster:build",
            "runtime_env": {"env_vars": environ},
            "args": {"model": model, "routing": "prefix", "replicas": REPLICAS, "cpus": 0.05, "gpus": 0},
        }

    def register(self, adapters: dict[str, str]) -> None:
        deployment = {"name": "djl-trtllm", "user_config": {"adapters": adapters}}
        self.cluster.call("configure", {**self._application, "deployments": [deployment]})

    def ask(self, adapter: str, session: int) -> tuple[str, int, str]:
        """The replica that has answered, the status and the body."""
        body = lmi("Once upon a time", max_new_tokens=2, adapters=adapter)
        answer = self.cluster.http.post(f"{ROUTE}/invocations", json=body, headers={"X-Session-Id": str(session)})
        return answer.headers.get("x-replica", ""), answer.status_code, answer.text

    def ask_all(self, adapter: str) -> dict[str, set[int]]:
        """The statuses of each replica's answers: sessions are spread over the replicas, and each stays at one."""
        statuses: dict[str, set[int]] = {}
        for session in range(12):
            replica, status, _ = self.ask(adapter, session)
            statuses.setdefault(replica, set()).add(status)
        return statuses

    def all_answer(self, adapter: str) -> bool:
        statuses = self.ask_all(adapter)
        return len(statuses) == REPLICAS and set.union(*statuses.values()) == {200}


@pytest.fixture(scope="module")
def adapting(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapting]:
    folder = tmp_path_factory.mktemp("models") / "lora"
    model, environ = tensorrt_llm_model(folder, **{"option.enable_lora": "true", "option.tensor_parallel_degree": 1})
    for name in ("a", "b"):
        write_adapter(model / "adapters" / "more" / name)
    made = Adapting(cluster, str(model), environ)
    made.register({"french": "more/a"})
    cluster.wait_for_replicas(REPLICAS + 1, APP)
    yield made
    cluster.call("delete", APP)


def test_every_replica_answers_for_an_adapter_of_the_user_config_and_for_no_other(adapting: Adapting) -> None:
    adapting.register({"french": "more/a"})
    wait_until(lambda: adapting.all_answer("french"), 60, "the adapter in all replicas")
    _, status, text = adapting.ask("german", 1)
    assert status >= 400
    assert "german" in text


def test_another_user_config_changes_the_adapters_of_the_replicas_that_run(adapting: Adapting) -> None:
    before = adapting.cluster.replicas()
    adapting.register({"french": "more/a"})
    wait_until(lambda: adapting.all_answer("french"), 60, "the adapter in all replicas")
    adapting.register({"german": "more/b"})
    wait_until(lambda: adapting.all_answer("german"), 60, "the new adapter in all replicas")
    assert all(200 not in statuses for statuses in adapting.ask_all("french").values())
    listed = adapting.cluster.http.get(f"{ROUTE}/adapters").text
    assert "german" in listed
    assert "french" not in listed
    assert adapting.cluster.replicas() == before
