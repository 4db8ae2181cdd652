"""Two models behind a gateway: requests find their model, and prompts the replica that had their beginning."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.sync.client import connect

from tests.support.client import lmi
from tests.support.models import scripted_model
from tests.support.ray_cluster import RayCluster, command
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MODELS = "/models-of-many"
STORY, TALE = "story", "tale"
REPLICAS = 2


@pytest.fixture(scope="module", autouse=True)
def url(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas of a model and one of another, which is slow."""
    folder = tmp_path_factory.mktemp("models")
    fast, slow = scripted_model(folder / "fast"), scripted_model(folder / "slow", {"steps_per_second": 50})
    models = {
        STORY: {"model": str(fast), "replicas": REPLICAS, "cpus": 0.05},
        TALE: {"model": str(slow), "replicas": REPLICAS, "cpus": 0.05, "options": {"max_rolling_batch_size": 1}},
    }
    cluster.call("deploy", {"models": models, "direct": True}, "many", MODELS)
    yield f"{cluster.url}{MODELS}"
    cluster.call("delete", "many")


def test_openais_client_finds_each_model_by_its_name(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == [STORY, TALE]
    for name in (STORY, TALE):
        whole = client.completions.create(model=name, prompt="Once upon a time", max_tokens=4)
        parts = client.completions.create(model=name, prompt="Once upon a time", max_tokens=4, stream=True)
        assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text != ""
        assert whole.model == name
    with pytest.raises(openai.NotFoundError, match=f"no model named 'epic' here; there are {STORY}, {TALE}"):
        client.completions.create(model="epic", prompt="x")


def test_the_turns_of_a_conversation_stay_at_a_replica(cluster: RayCluster) -> None:
    replicas = set()
    for number in range(12):
        messages = [{"role": "user", "content": f"conversation {number}: " + "words " * 50}]
        seen = set()
        for _ in range(3):
            body = {"model": STORY, "max_tokens": 2, "prompt": json.dumps(messages)}
            answer = cluster.http.post(f"{MODELS}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            seen.add(answer.headers["x-replica"])
            messages.append({"role": "user", "content": "and more " * 30})
        assert len(seen) == 1
        replicas |= seen
    assert len(replicas) == REPLICAS


def test_large_bodies_and_errors_are_those_of_the_server(cluster: RayCluster) -> None:
    large = cluster.http.post(f"{MODELS}/models/{STORY}/invoke", content=b'{"inputs": "' + b"x" * 5_000_000 + b'"}')
    assert large.status_code == 424
    assert "max_input_len" in large.text
    too_large = cluster.http.post(f"{MODELS}/models/{STORY}/invoke", content=b"x" * 7_000_000)
    assert too_large.status_code == 413
    adapter = cluster.http.post(f"{MODELS}/models/{STORY}/adapters?name=a&src=b")
    assert adapter.status_code == 400
    assert "one of several replicas" in adapter.text


def samples(cluster: RayCluster, name: str) -> dict[tuple[str, str], float]:
    """The sums of a metric by deployment and replica."""
    page = cluster.http.get(f"{MODELS}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert page.status_code == 200, page.text
    sums: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            if sample.name == name:
                of = (sample.labels["deployment"], sample.labels["replica"])
                sums[of] = sums.get(of, 0.0) + sample.value
    return sums


def test_the_page_of_metrics_has_all_replicas_of_all_models(cluster: RayCluster) -> None:
    everywhere = [STORY] * REPLICAS + [TALE] * REPLICAS

    def deployments() -> list[str]:
        return sorted(deployment for deployment, _ in samples(cluster, "djl_trtllm_requests_total"))

    wait_until(lambda: deployments() == everywhere, 120, "all replicas: other tests kill some")
    before = samples(cluster, "djl_trtllm_requests_total")
    assert samples(cluster, "djl_trtllm_replica_scraped") == dict.fromkeys(before, 1.0)
    assert samples(cluster, "process_open_fds").keys() == before.keys()
    names = set()
    for number in range(12):
        answer = cluster.http.post(f"{MODELS}/models/{STORY}/invoke", json=lmi(f"prompt {number} " * 30))
        of = (STORY, answer.headers["x-replica"])
        before[of] += 1
        names.add(of)
    assert len(names) == REPLICAS
    assert samples(cluster, "djl_trtllm_requests_total") == before


def test_a_replica_that_hangs_is_named_on_the_page_of_metrics(cluster: RayCluster) -> None:
    replica = next(each for each in cluster.replicas() if f":many:{STORY}" in command(each))
    replica.suspend()
    try:
        scraped = samples(cluster, "djl_trtllm_replica_scraped")
    finally:
        replica.resume()
    assert sorted(value for (deployment, _), value in scraped.items() if deployment == STORY) == [0.0, 1.0]


def test_the_messages_of_a_websocket_are_requests(cluster: RayCluster) -> None:
    address = f"{cluster.url}{MODELS}/invocations-bidirectional-stream?model_name={STORY}".replace("http", "ws", 1)
    with connect(address, proxy=None) as socket:
        for number in range(3):
            socket.send(json.dumps(lmi(f"message {number}", max_new_tokens=4)))
            assert json.loads(socket.recv(60))["generated_text"]


def test_there_is_no_live_page(cluster: RayCluster) -> None:
    refused = cluster.http.get(f"{MODELS}/monitor")
    assert refused.status_code == 404
    assert "/metrics has the figures of all replicas" in refused.text
    assert "monitor" not in cluster.http.get(f"{MODELS}/").json()["links"]


def test_where_a_gateway_dies_what_it_asked_for_ends_in_the_replicas(cluster: RayCluster) -> None:
    body = lmi("for a minute", max_new_tokens=3000, stream=True)
    with (
        pytest.raises(httpx.TransportError),
        cluster.http.stream("POST", f"{MODELS}/models/{TALE}/invoke", json=body) as answer,
    ):
        for count, _ in enumerate(answer.iter_lines()):
            if not count:
                assert sum(samples(cluster, "djl_trtllm_running").values()) == 1
                (gateway,) = [each for each in cluster.replicas() if ":many:gateway" in command(each)]
                gateway.kill()

    def is_idle() -> bool:
        try:
            return sum(samples(cluster, "djl_trtllm_running").values()) == 0
        except (AssertionError, httpx.TransportError):  # there is no gateway yet
            return False

    wait_until(is_idle, 50, "the end of what nobody reads")


def test_where_a_replica_dies_its_streams_break_off_and_what_waits_goes_to_another_one(cluster: RayCluster) -> None:
    # Each of the two replicas has place for one: one stream runs on each, the others wait.
    ended: list[str] = []
    began = threading.Semaphore(0)

    def read(number: int) -> None:
        body = lmi(f"stream {number} " * 30, max_new_tokens=60, stream=True)
        try:
            with cluster.http.stream("POST", f"{MODELS}/models/{TALE}/invoke", json=body) as answer:
                for count, _ in enumerate(answer.iter_lines()):
                    if not count:
                        began.release()
            ended.append("whole")
        except httpx.RemoteProtocolError:
            ended.append("broken off")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(REPLICAS):
        assert began.acquire(timeout=60)
    victim = next(replica for replica in cluster.replicas() if f":many:{TALE}" in command(replica))
    victim.kill()
    for thread in threads:
        thread.join(120)
    assert sorted(ended) == ["broken off", *["whole"] * 5]
