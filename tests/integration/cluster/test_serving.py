"""What clients get through Ray is what they get without; adapters of `user_config` are those of all replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.cluster.conftest import SCRIPTED
from tests.support.client import lmi
from tests.support.models import tensorrt_llm_model, write_adapter
from tests.support.processes import wait_until
from tests.support.ray_cluster import RayCluster
from tests.support.server import Server

pytestmark = pytest.mark.slow

STORY = "Once upon a time there was a little girl"


@pytest.mark.parametrize("stream", [False, True])
def test_the_bundled_model_answers_byte_for_byte_as_without_ray(
    cluster: RayCluster, server: Server, stream: bool
) -> None:
    # A prompt of which another request has computed a part has log-probabilities with other last digits.
    given: dict[str, Any] = {"stream": stream, "max_new_tokens": 40, "details": True, "cache_salt": f"{stream}"}
    asked = [lmi(inputs, **given) for inputs in (STORY, "Wolf \N{WOLF FACE}")]
    for request in (*asked, lmi(STORY, temperature="hot"), lmi("wolf " * 3000)):
        expected = server.http.post("/invocations", json=request)
        answer = cluster.http.post("/invocations", json=request)
        assert (answer.status_code, answer.content) == (expected.status_code, expected.content)
        assert answer.headers["content-type"] == expected.headers["content-type"]
        assert (answer.status_code == 200) == (request in asked)


def test_an_answer_has_one_request_id_that_of_its_request(cluster: RayCluster) -> None:
    given = cluster.http.post("/invocations", json=lmi(STORY, max_new_tokens=1), headers={"X-Request-ID": "mine"})
    assert given.headers.get_list("x-request-id") == ["mine"]
    made = cluster.http.get("/ping")
    assert len(made.headers.get_list("x-request-id")) == 1
    assert len(made.headers["x-request-id"]) > 30


def test_another_model_of_the_cluster_has_its_own_route(cluster: RayCluster) -> None:
    answer = cluster.http.post(f"{SCRIPTED}/invocations", json=lmi(STORY, max_new_tokens=8))
    assert answer.status_code == 200
    assert answer.json()["generated_text"].strip() in STORY
    assert cluster.http.get(f"{SCRIPTED}/v1/models").json()["data"][0]["id"] == "scripted"
    assert cluster.http.get("/v1/models").json()["data"][0]["id"] == "tiny-stories"


def replica_of(cluster: RayCluster, prompt: str, **headers: str) -> str:
    """The replica of the scripted model that answers."""
    answer = cluster.http.post(f"{SCRIPTED}/invocations", json=lmi(prompt, max_new_tokens=1), headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-replica"])


def test_requests_of_a_session_reach_one_replica(cluster: RayCluster) -> None:
    def replicas(number: int) -> set[str]:
        return {replica_of(cluster, STORY, **{"X-Session-Id": f"session-{number}"}) for _ in range(3)}

    # While HAProxy learns of the second replica, sessions move. That 24 are at one by chance does not happen.
    wait_until(lambda: len(set.union(*map(replicas, range(24)))) == 2, what="sessions at both replicas")
    assert all(len(replicas(number)) == 1 for number in range(24))


def test_the_next_turn_of_a_conversation_reaches_the_replica_of_the_one_before(cluster: RayCluster) -> None:
    if not cluster.has_routers:
        pytest.skip("this Ray asks no router of ours")
    first = {number: replica_of(cluster, f"{number} {STORY} " * 10) for number in range(8)}
    for number, replica in first.items():
        assert replica_of(cluster, f"{number} {STORY} " * 20) == replica
    assert len(set(first.values())) == 2


# -- Adapters of `user_config` are those of all replicas, without a restart --------------------------------------------

APP, ROUTE = "adapting", "/adapting"
REPLICAS = 2


class Adapting:
    """Two replicas of a model with folders of adapters that are not registered."""

    def __init__(self, cluster: RayCluster, model: str, environ: dict[str, str]) -> None:
        self.cluster = cluster
        self._application = {
            "name": APP,
            "route_prefix": ROUTE,
            "import_path": "djl_trtllm.cluster:build",
            "runtime_env": {"env_vars": environ},
            "args": {"model": model, "replicas": REPLICAS, "cpus": 0.05, "gpus": 0},
        }

    def register(self, adapters: dict[str, str]) -> None:
        deployment = {"name": "djl-trtllm", "user_config": {"adapters": adapters}}
        self.cluster.call("configure", {**self._application, "deployments": [deployment]})

    def ask(self, adapter: str, session: int = 1) -> tuple[int, str]:
        """The status and the body of an answer."""
        body = lmi("Once upon a time", max_new_tokens=2, adapters=adapter)
        answer = self.cluster.http.post(f"{ROUTE}/invocations", json=body, headers={"X-Session-Id": str(session)})
        return answer.status_code, answer.text

    def statuses(self, adapter: str) -> set[int]:
        """The statuses of both replicas' answers: 16 sessions are all at one of them once in 32,768 times."""
        return {self.ask(adapter, session)[0] for session in range(16)}


@pytest.fixture(scope="module")
def adapting(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapting]:
    folder = tmp_path_factory.mktemp("models") / "lora"
    model, environ = tensorrt_llm_model(folder, **{"option.enable_lora": "true", "option.tensor_parallel_degree": 1})
    for name in ("a", "b"):
        write_adapter(model / "adapters" / "more" / name)
    made = Adapting(cluster, str(model), environ)
    made.register({"french": "more/a"})
    cluster.wait_for_replicas(REPLICAS, APP)
    yield made
    cluster.call("delete", APP)


def test_another_user_config_changes_the_adapters_of_the_replicas_that_run(adapting: Adapting) -> None:
    before = adapting.cluster.replicas(APP)
    adapting.register({"french": "more/a"})
    wait_until(lambda: adapting.statuses("french") == {200}, what="the adapter in all replicas")
    adapting.register({"german": "more/b"})
    wait_until(lambda: adapting.statuses("german") == {200}, what="the new adapter in all replicas")
    assert 200 not in adapting.statuses("french")
    assert "french" in adapting.ask("french")[1]
    listed = adapting.cluster.http.get(f"{ROUTE}/adapters").text
    assert "german" in listed
    assert "french" not in listed
    assert adapting.cluster.replicas(APP) == before
