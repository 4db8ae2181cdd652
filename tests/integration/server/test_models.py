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

from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.server.startup import plan_startup
from tests.support.client import JSON, body, raw_post, read_all
from tests.support.models import scripted_model
from tests.support.server import Server, serving
from tests.support.waiting import wait_until


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
def server(_running: Server) -> Iterator[Server]:
    """A server with the model `scripted` and a model store; whatever a test registers is gone after it."""
    yield _running
    for model in _running.http.get("/models").json()["models"]:
        if model["modelName"] != "scripted":
            _running.http.delete(f"/models/{model['modelName']}")
    assert len(_running.hosts()) == 1
    assert _running.ping() == 200


def register(server: Server, url: str, **values: str) -> httpx.Response:
    return server.http.post("/models", params={"url": url, **values})


def invoke(server: Server, model: str) -> httpx.Response:
    return server.http.post(f"/models/{model}/invoke", content=body(3), headers=JSON)


def test_a_registered_model_serves_in_an_engine_process_of_its_own(server: Server) -> None:
    assert invoke(server, "red").status_code == 404
    answer = register(server, "red")
    assert (answer.status_code, answer.json()) == (200, {"status": 'Model "red" registered.'})
    assert invoke(server, "red").json()["generated_text"]
    assert server.http.post("/predictions/red", content=body(3), headers=JSON).status_code == 200
    assert len(server.hosts()) == 2
    listed = {model["modelName"]: model for model in server.http.get("/models").json()["models"]}
    assert listed["red"] == {"modelName": "red", "modelUrl": "red", "status": "READY"}
    assert server.http.delete("/models/red").json() == {"status": 'Model "red" unregistered'}
    assert invoke(server, "red").status_code == 404
    assert len(server.hosts()) == 1


def test_with_several_models_a_request_names_one_or_is_for_that_of_the_start(server: Server) -> None:
    register(server, "red")

    def answered(model: str) -> float:
        return server.metric("requests_total", model=model)

    before = answered("scripted"), answered("red")
    assert server.http.post("/invocations", content=body(3), headers=JSON).status_code == 200
    assert (answered("scripted"), answered("red")) == (before[0] + 1, before[1])
    assert server.http.post("/invocations?model_name=red", content=body(3), headers=JSON).status_code == 200
    header = {**JSON, "X-Amzn-SageMaker-Custom-Attributes": "model_name=red"}
    assert server.http.post("/invocations", content=body(3), headers=header).status_code == 200
    assert (answered("scripted"), answered("red")) == (before[0] + 1, before[1] + 2)
    assert server.http.post("/invocations?model_name=green", content=body(3), headers=JSON).status_code == 404


def test_sagemaker_registers_with_json_and_an_absolute_path(server: Server, store: Path) -> None:
    answer = server.http.post("/models", json={"model_name": "m1", "url": str(store / "red")})
    assert answer.status_code == 200
    assert invoke(server, "m1").status_code == 200
    assert server.http.post("/models", json={"model_name": "m1", "url": str(store / "red")}).status_code == 409


def test_an_archive_of_the_store_is_a_model(server: Server) -> None:
    assert register(server, "packed.tar.gz").status_code == 200
    assert invoke(server, "packed").status_code == 200


def test_a_registration_in_the_background_answers_at_once(server: Server) -> None:
    answer = register(server, "slow", synchronous="false")
    assert answer.status_code == 202
    assert invoke(server, "slow").status_code == 503
    # What only is being loaded does not make the server unhealthy.
    assert server.ping() == 200
    assert server.http.delete("/models/slow").status_code == 200
    wait_until(lambda: len(server.hosts()) == 1, what="the end of the host")


@pytest.mark.parametrize(
    ("url", "status", "reason"),
    [("broken", 500, "no such engine"), ("full", 507, "lower option.kv_cache_free_gpu_mem_fraction")],
)
def test_a_model_that_does_not_load_is_not_registered(server: Server, url: str, status: int, reason: str) -> None:
    answer = register(server, url)
    assert answer.status_code == status
    assert reason in answer.json()["message"]
    assert server.http.get(f"/models/{url}").status_code == 404


@pytest.mark.parametrize(
    ("url", "status"),
    [("", 400), ("..", 400), ("/etc", 400), ("../first/model", 400), (".", 400), ("green", 404), ("s3://a/b", 404)],
)
def test_models_come_from_the_store_only(server: Server, url: str, status: int) -> None:
    assert register(server, url).status_code == status
    assert len(server.http.get("/models").json()["models"]) == 1


def test_scaling_adds_and_removes_engine_processes_and_loses_nothing(server: Server) -> None:
    register(server, "red", min_worker="2")
    assert len(server.hosts()) == 3
    finished = server.finished("length")
    connections = [server.connect() for _ in range(12)]
    for connection in connections:
        connection.sendall(raw_post(body(60), "Connection: close", path="/models/red/invoke"))
    wait_until(lambda: server.metric("running", model="red") + server.finished("length") == finished + 12)
    assert server.http.put("/models/red", params={"min_worker": "1"}).status_code == 200
    assert server.http.put("/models/red", params={"min_worker": "3", "max_worker": "3"}).status_code == 200
    for connection in connections:
        assert read_all(connection).startswith(b"HTTP/1.1 200")
        connection.close()
    (described,) = server.http.get("/models/red").json()[0]["models"]
    assert [worker["status"] for worker in described["workerGroups"][0]["workers"]] == ["READY"] * 3
    assert server.metric("workers", model="red") == 3


def test_a_model_that_goes_while_it_is_scaled_leaves_nothing(server: Server) -> None:
    register(server, "late")
    scaled: list[int] = []

    def scale() -> None:
        put = httpx.put(f"{server.url}/models/late?min_worker=2", timeout=30, trust_env=False)
        scaled.append(put.status_code)

    thread = threading.Thread(target=scale)
    thread.start()
    wait_until(lambda: len(server.hosts()) == 3, what="a host that is being started")
    assert server.http.delete("/models/late").status_code == 200
    thread.join()
    assert scaled == [500]
    wait_until(lambda: len(server.hosts()) == 1, what="the end of the hosts")


@pytest.mark.parametrize(
    "values", [{"min_worker": "0"}, {"min_worker": "3", "max_worker": "2"}, {"min_worker": "many"}]
)
def test_a_scale_that_makes_no_sense_is_refused(server: Server, values: dict[str, str]) -> None:
    assert server.http.put("/models/scripted", params=values).status_code == 400


def test_an_engine_process_that_dies_costs_its_own_worker_only(server: Server) -> None:
    register(server, "red", min_worker="2")

    def first_worker() -> dict[str, object]:
        described = server.http.get("/models/red").json()[0]["models"][0]
        worker: dict[str, object] = described["workerGroups"][0]["workers"][0]
        return worker

    killed = int(str(first_worker()["pid"]))
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: first_worker()["pid"] != killed, what="that the server notices")
    assert [invoke(server, name).status_code for name in ("red", "scripted") * 4] == [200] * 8


def test_wrong_methods_and_bodies_are_reported(server: Server) -> None:
    assert server.http.patch("/models").status_code == 405
    assert server.http.patch("/models/scripted").status_code == 405
    assert server.http.post("/models", content=b"{").status_code == 400
    assert server.http.post("/models", content=b"[]").status_code == 400
    assert server.http.delete("/models/green").status_code == 404


def test_without_a_store_nothing_can_be_registered(tmp_path: Path, store: Path) -> None:
    with serving(scripted_model(tmp_path / "model")) as alone:
        answer = register(alone, "red")
        assert (answer.status_code, "--model-store" in answer.text) == (400, True)


def test_a_store_is_enough_to_start_with(store: Path) -> None:
    environ = {"SERVING_MODEL_STORE": str(store)}
    options, startup, found = plan_startup(None, environ)
    assert (options.model_store, startup, found) == (str(store), [], store)
    _, startup, _ = plan_startup(None, {**environ, "SERVING_LOAD_MODELS": "blue,packed.tar.gz"})
    assert [model.name for model in startup] == ["blue", "packed"]
    _, startup, _ = plan_startup(None, {**environ, "SERVING_LOAD_MODELS": "ALL"})
    assert len(startup) == 7
    with pytest.raises(ConfigError, match="green"):
        plan_startup(None, {**environ, "SERVING_LOAD_MODELS": "green"})
    with pytest.raises(ConfigError, match="no such folder"):
        plan_startup(None, {"SERVING_MODEL_STORE": "/none"})
    with pytest.raises(DjlTrtllmError, match="--model-store"):
        plan_startup(None, {})


def test_a_multi_model_endpoint_of_sagemaker_starts_with_none(tmp_path: Path) -> None:
    _, startup, store = plan_startup(str(tmp_path), {"SAGEMAKER_MULTI_MODEL": "true"})
    assert (startup, store) == ([], Path("/opt/ml/models"))
