"""Several models in one server: register, describe, scale, unregister, and the others never notice."""

from __future__ import annotations

import os
import signal
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.client import JSON, body, raw_post, read_all
from tests.support.models import scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model store."""
    store = tmp_path_factory.mktemp("store")
    for name in ("red", "blue"):
        scripted_model(store / name, {"steps_per_second": 100}, **{"option.model_name": name})
    scripted_model(store / "broken", {"start_error": "no such engine"})
    scripted_model(store / "full", {"start_error": "CUDA error: out of memory"})
    scripted_model(store / "late", {"start_seconds": 1})
    scripted_model(store / "slow", {"start_seconds": 60})
    with tarfile.open(store / "packed.tar.gz", "w:gz", dereference=True) as archive:
        archive.add(store / "blue", arcname=".")
    return store


@pytest.fixture(scope="module")
def _running(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = scripted_model(tmp_path_factory.mktemp("first") / "model", {"steps_per_second": 100})
    cache = tmp_path_factory.mktemp("cache")
    with serving(model, SERVING_MODEL_STORE=str(store), DJL_CACHE_DIR=str(cache)) as server:
        yield server


@pytest.fixture
def registering(_running: Server) -> Iterator[Server]:
    """A server with the model `scripted` and a model store; whatever a test registers is gone after it."""
    yield _running
    for model in _running.http.get("/models").json()["models"]:
        if model["modelName"] != "scripted":
            _running.http.delete(f"/models/{model['modelName']}")
    assert len(_running.hosts()) == 1
    assert _running.ping() == 200


def register(registering: Server, url: str, **values: str) -> httpx.Response:
    return registering.http.post("/models", params={"url": url, **values})


def invoke(registering: Server, model: str) -> httpx.Response:
    return registering.http.post(f"/models/{model}/invoke", content=body(3), headers=JSON)


def test_a_registered_model_serves_in_an_engine_process_of_its_own(registering: Server) -> None:
    assert invoke(registering, "red").status_code == 404
    answer = register(registering, "red")
    assert (answer.status_code, answer.json()) == (200, {"status": 'Model "red" registered.'})
    assert invoke(registering, "red").json()["generated_text"]
    assert registering.http.post("/predictions/red", content=body(3), headers=JSON).status_code == 200
    assert len(registering.hosts()) == 2
    listed = {model["modelName"]: model for model in registering.http.get("/models").json()["models"]}
    assert listed["red"] == {"modelName": "red", "modelUrl": "red", "status": "READY"}
    assert registering.http.delete("/models/red").json() == {"status": 'Model "red" unregistered'}
    assert invoke(registering, "red").status_code == 404
    assert len(registering.hosts()) == 1


def test_scaling_adds_and_removes_engine_processes_and_loses_nothing(registering: Server) -> None:
    register(registering, "red", min_worker="2")
    assert len(registering.hosts()) == 3
    finished = registering.finished("length")
    connections = [registering.connect() for _ in range(12)]
    for connection in connections:
        connection.sendall(raw_post(body(60), "Connection: close", path="/models/red/invoke"))
    wait_until(lambda: registering.metric("running", model="red") + registering.finished("length") == finished + 12)
    assert registering.http.put("/models/red", params={"min_worker": "1"}).status_code == 200
    assert registering.http.put("/models/red", params={"min_worker": "3", "max_worker": "3"}).status_code == 200
    for connection in connections:
        assert read_all(connection).startswith(b"HTTP/1.1 200")
        connection.close()
    (described,) = registering.http.get("/models/red").json()[0]["models"]
    assert [worker["status"] for worker in described["workerGroups"][0]["workers"]] == ["READY"] * 3
    assert registering.metric("workers", model="red") == 3


def test_a_model_that_goes_while_it_is_scaled_leaves_nothing(registering: Server) -> None:
    register(registering, "late")
    scaled: list[int] = []

    def scale() -> None:
        put = httpx.put(f"{registering.url}/models/late?min_worker=2", timeout=300, trust_env=False)
        scaled.append(put.status_code)

    thread = threading.Thread(target=scale)
    thread.start()
    wait_until(lambda: len(registering.hosts()) == 3, what="a host that is being started")
    assert registering.http.delete("/models/late").status_code == 200
    thread.join()
    assert scaled == [500]
    wait_until(lambda: len(registering.hosts()) == 1, what="the end of the hosts")


def test_an_engine_process_that_dies_costs_its_own_worker_only(registering: Server) -> None:
    register(registering, "red", min_worker="2")

    def first_worker() -> dict[str, object]:
        described = registering.http.get("/models/red").json()[0]["models"][0]
        worker: dict[str, object] = described["workerGroups"][0]["workers"][0]
        return worker

    killed = int(str(first_worker()["pid"]))
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: first_worker()["pid"] != killed, what="that the server notices")
    assert [invoke(registering, name).status_code for name in ("red", "scripted") * 4] == [200] * 8
