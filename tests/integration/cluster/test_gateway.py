"""Two models behind a gateway: requests find their model, and prompts the replica that had their beginning."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.client import lmi
from tests.support.models import scripted_model
from tests.support.ray_cluster import RayCluster, command

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
    for number in range(6):
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
