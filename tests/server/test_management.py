"""Models that are listed, described, scaled and unregistered over HTTP."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path

import orjson
import pytest

from djl_trtllm.api.base import SMALL
from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.model import Tokenizer
from djl_trtllm.server import management
from djl_trtllm.service.lifecycle import ServedModel, State
from djl_trtllm.service.model import Model
from tests.server.application import Application, application, body
from tests.support.asgi import Connection
from tests.support.in_process import Hosts
from tests.support.models import scripted_model
from tests.support.tables import by_table
from tests.support.virtual_time import until


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_model_is_described_with_its_workers(hosts: Hosts, tokenizer: Tokenizer, method: str) -> None:
    async with application(tokenizer, workers=2, max_rolling_batch_size=1, job_queue_size=7) as served:
        requests = [served.client.begin("POST", "/invocations", body()) for _ in range(4)]
        await until(lambda: sum(worker.load_now for worker in served.registry.models["story"].workers) == 4)
        answer = await served.client.get("/models/story", method=method)
        assert answer.status == 200
        assert answer.json == [
            {
                "workflowName": "story",
                "models": [
                    {
                        "modelName": "story",
                        "modelUrl": "/story",
                        "status": "READY",
                        "loadedAtStartup": True,
                        "requestInQueue": 2,
                        "workerGroups": [
                            {
                                "minWorkers": 2,
                                "maxWorkers": 2,
                                "workers": [
                                    {"id": 0, "status": "READY", "pid": hosts.made[0].pid},
                                    {"id": 1, "status": "READY", "pid": hosts.made[1].pid},
                                ],
                            }
                        ],
                        "batchSize": 1,
                        "queueSize": 7,
                    }
                ],
            }
        ]
        for request in requests:
            request.leave()
            await request.end()


async def test_a_model_that_does_not_run_is_described_as_far_as_it_goes(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, workers=2, retry_threshold=0) as served:
        hosts.made[0].die("it was killed by SIGKILL")
        await asyncio.sleep(1)
        (described,) = (await served.client.get("/models/story")).json[0]["models"]
        assert described["status"] == "FAILED"
        assert described["workerGroups"][0]["workers"][0] == {"id": 0, "status": "FAILED", "pid": None}
        assert "SIGKILL" in described["failure"]
        assert described["requestInQueue"] == 0
        served.registry.add(ServedModel("fable", "/store/fable", at_startup=False))
        (described,) = (await served.client.get("/models/fable")).json[0]["models"]
        assert (described["status"], described["loadedAtStartup"]) == ("LOADING", False)
        assert not {"failure", "batchSize", "queueSize"} & described.keys()


# -- scaling -----------------------------------------------------------------------------------------------------------


async def test_a_worker_that_does_not_start_is_an_error_and_the_others_serve(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    async with application(tokenizer) as served:
        hosts.failures = [ExecutorStartError("no room")]
        answer = await served.client.get("/models/story", "min_worker=2", method="PUT")
        assert (answer.status, answer.json["type"], answer.json["message"]) == (500, "ModelException", "no room")
        assert served.registry.models["story"].state is State.READY


# -- unregistering -----------------------------------------------------------------------------------------------------


STORE = Path("/")
"""Holds whatever a model of `application` comes from."""


@by_table("source", "at_startup", "status")
async def test_ping_tells_of_a_model_of_the_start_that_cannot_come_back(
    source: str, at_startup: bool, status: int
) -> None:
    async with application(store=Path("/store")) as served:
        served.registry.add(ServedModel("story", source, at_startup=at_startup))
        assert (await served.client.get("/models/story", method="DELETE")).status == 200
        answer = await served.client.get("/ping")
        assert (answer.status, answer.json) == (status, {"story": {"status": "Unregistered"}} if status == 503 else {})
        served.registry.add(ServedModel("story", source, at_startup=False))
        assert (await served.client.get("/ping")).status == 200


async def test_an_unregistered_model_ends_what_it_has_begun(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, store=STORE) as served:
        request = served.client.begin("POST", "/invocations", body(1))
        await until(lambda: bool(hosts.last.submitted))
        gone = served.client.begin("DELETE", "/models/story")
        await asyncio.sleep(1)
        assert not gone.done()
        assert (await served.client.post("/predictions/story", body())).status == 404
        hosts.last.step()
        assert (await request.end()).status == 200
        await gone.end()
        assert (gone.status, gone.json) == (200, {"status": 'Model "story" unregistered'})
        assert (hosts.last.closed, served.registry.models) == (True, {})


async def test_an_unregistered_model_has_shutdown_timeout_seconds(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, store=STORE) as served:
        request = served.client.begin("POST", "/invocations", body(100))
        await until(lambda: bool(hosts.last.submitted))
        gone = served.client.begin("DELETE", "/models/story")
        await asyncio.sleep(4.9)
        assert not gone.done()
        await asyncio.sleep(0.2)
        assert gone.done()
        assert (await request.end()).status == 529


async def test_models_are_listed_in_pages() -> None:
    async with application() as served:
        for number in range(205):
            served.registry.add(ServedModel(f"m{number}", "/m"))
        names, query, sizes = [], "", []
        while True:
            page = (await served.client.get("/models", query=query)).json
            names += [model["modelName"] for model in page["models"]]
            sizes.append(len(page["models"]))
            if "nextPageToken" not in page:
                break
            query = f"next_page_token={page['nextPageToken']}"
        assert names == [f"m{number}" for number in range(205)] and sizes == [100, 100, 5]
        page = (await served.client.get("/models", query="limit=2&next_page_token=203")).json
        assert [model["modelName"] for model in page["models"]] == ["m203", "m204"] and len(page) == 1
        page = (await served.client.get("/models", query="limit=0")).json
        assert (len(page["models"]), page["nextPageToken"]) == (1, "1")
        assert (await served.client.get("/models", query="next_page_token=9999")).json == {"models": []}
        for wrong in ("limit=101", "limit=-1", "next_page_token=x", f"next_page_token={'9' * 5000}"):
            assert (await served.client.get("/models", query=wrong)).status == 400


# Models that are registered over HTTP, from the model store and from nowhere else.


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder with a model."""
    scripted_model(tmp_path / "store" / "red")
    scripted_model(tmp_path / "outside")
    return tmp_path / "store"


async def register(served: Application, query: str, body: bytes = b"") -> Connection:
    return await served.client.post("/models", body, query=query)


async def test_a_model_of_the_store_is_registered_and_serves(hosts: Hosts, store: Path) -> None:
    hosts.alone = True
    async with application(store=store) as served:
        answer = await register(served, "url=red")
        assert (answer.status, answer.json) == (200, {"status": 'Model "red" registered.'})
        assert (await served.client.post("/models/red/invoke", body())).status == 200
        model = served.registry.models["red"]
        assert (model.source, model.at_startup, len(model.workers)) == ("red", False, 1)
        assert model.model.directory == store / "red"


@pytest.mark.parametrize("form", ["{store}/red", "file://{store}/red", "file://red", "red/"])
async def test_a_model_may_be_named_by_path_and_address(hosts: Hosts, store: Path, form: str) -> None:
    async with application(store=store) as served:
        assert (await register(served, f"url={form.format(store=store)}")).status == 200
        assert list(served.registry.models) == ["red"]


async def test_sagemaker_registers_with_json(hosts: Hosts, store: Path) -> None:
    async with application(store=store) as served:
        given = {"model_name": "m1", "url": str(store / "red"), "min_worker": None, "initial_workers": 2}
        assert (await register(served, "", json.dumps(given).encode())).status == 200
        assert len(served.registry.models["m1"].workers) == 2
        # What the query says wins.
        assert (await register(served, "model_name=m2&min_worker=1", json.dumps(given).encode())).status == 200
        assert len(served.registry.models["m2"].workers) == 1


async def test_an_archive_has_the_name_before_its_suffix(
    hosts: Hosts, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJL_CACHE_DIR", str(tmp_path / "cache"))
    with tarfile.open(store / "packed.tar.gz", "w:gz", dereference=True) as archive:
        archive.add(store / "red", arcname=".")
    async with application(store=store) as served:
        assert (await register(served, "url=packed.tar.gz")).status == 200
        assert list(served.registry.models) == ["packed"]


@by_table("query", "workers", apart=True)
async def test_a_model_is_registered_with_workers(hosts: Hosts, store: Path, query: str, workers: int) -> None:
    async with application(store=store) as served:
        await register(served, f"url=red{query}")
        assert len(served.registry.models["red"].workers) == workers


async def test_the_model_that_the_server_was_started_with_is_not_the_models(
    hosts: Hosts, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODEL_ID", str(tmp_path / "nowhere"))
    monkeypatch.setenv("OPTION_PREDICT_TIMEOUT", "77")
    async with application(store=store) as served:
        assert (await register(served, "url=red")).status == 200
        assert served.registry.models["red"].model.config.options.predict_timeout == 77


# -- refusing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reason", "status"), [("no such engine", 500), ("CUDA error: Out of Memory", 507)])
async def test_a_model_that_does_not_load_is_not_registered(
    hosts: Hosts, store: Path, reason: str, status: int
) -> None:
    hosts.failures = [None, ExecutorStartError(reason)]
    async with application(store=store) as served:
        answer = await register(served, "url=red&min_worker=2")
        assert (answer.status, answer.json["type"], answer.json["message"]) == (status, "ModelException", reason)
        assert served.registry.models == {}
        assert hosts.made[0].closed


async def test_a_defect_is_no_secret_and_in_the_log(
    hosts: Hosts, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(path: str, opened: object) -> Model:
        raise KeyError("tokenizer")

    monkeypatch.setattr(management, "prepare_apart", prepare)
    async with application(store=store) as served:
        answer = await register(served, "url=red")
        assert (answer.status, answer.json["message"]) == (500, "loading it failed: KeyError('tokenizer')")
        assert "model red: loading it failed" in caplog.text and "Traceback" in caplog.text


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(hosts: Hosts) -> Hosts:
    """Hosts that take ten seconds."""
    hosts.load_seconds = 10
    return hosts


async def begun(hosts: Hosts, number: int = 1) -> None:
    """A model has begun to load."""
    await until(lambda: len(hosts.made) == number and hosts.last.started_with is not None)


@pytest.mark.parametrize("word", ["false", "False"])
async def test_a_registration_in_the_background_answers_at_once(slow: Hosts, store: Path, word: str) -> None:
    async with application(store=store) as served:
        answer = await register(served, f"url=red&synchronous={word}")
        assert (answer.status, answer.json) == (202, {"status": 'Model "red" registration scheduled.'})
        model = served.registry.models["red"]
        assert model.state is State.LOADING
        await until(lambda: model.state is State.READY)


async def test_a_model_that_fails_in_the_background_stays_and_says_why(slow: Hosts, store: Path) -> None:
    slow.failures = [ExecutorStartError("no such engine")]
    async with application(store=store) as served:
        await register(served, "url=red&synchronous=false")
        await until(lambda: served.registry.models["red"].state is State.FAILED)
        (described,) = (await served.client.get("/models/red")).json[0]["models"]
        assert described["failure"] == "no such engine"


async def test_a_model_may_be_unregistered_while_it_loads(
    slow: Hosts, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with application(store=store) as served:
        registration = served.client.begin("POST", "/models", query="url=red")
        await begun(slow)
        before = asyncio.get_running_loop().time()
        assert (await served.client.get("/models/red", method="DELETE")).status == 200
        assert slow.last.closed
        assert asyncio.get_running_loop().time() - before < 1
        await registration.end()
        assert registration.status == 500
        assert registration.json["message"] == "the model was unregistered while it was loading"
        assert served.registry.models == {}
        assert caplog.records == []


async def test_a_name_may_be_taken_again_before_its_old_model_is_gone(slow: Hosts, store: Path) -> None:
    async with application(store=store) as served:
        for number in (1, 2):
            await register(served, "url=red&synchronous=false")
            await begun(slow, number)
            gone = served.client.begin("DELETE", "/models/red")
            await until(lambda: not served.registry.models)
        await register(served, "url=red&synchronous=false")
        await begun(slow, 3)
        await gone.end()
        # The new model's work is known by its name.
        assert (await served.client.get("/models/red", method="DELETE")).status == 200
        assert slow.last.closed


async def test_the_end_of_the_server_ends_what_loads(slow: Hosts, store: Path) -> None:
    async with application(store=store) as served:
        await register(served, "url=red&synchronous=false")
        await begun(slow)
        before = asyncio.get_running_loop().time()
        await served.models.close()
        assert slow.last.closed
        assert asyncio.get_running_loop().time() - before < 1


# -- adapters over HTTP -----------------------------------------------------------------------------------------------


COLLECTIONS = ["/adapters", "/models/story/adapters"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's, with two adapters and one that is not registered by itself."""
    for name in ("dutch", "french", "more/greek"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    return tmp_path


async def test_sagemaker_registers_an_adapter_of_an_inference_component(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path
) -> None:
    (directory / "mount" / "dutch").mkdir(parents=True)
    (directory / "mount" / "dutch" / "adapter_config.json").write_text("{}")
    model = directory / "model"
    (model / "adapters").mkdir(parents=True)
    hosts.features |= {Feature.ADAPTERS}
    async with application(tokenizer, directory=model, adapter_roots=(str(directory / "mount"),)) as served:
        content = {"name": "component-1", "src": str(directory / "mount" / "dutch"), "preload": True, "pin": False}
        alias = {"X-Amzn-SageMaker-Adapter-Alias": "dutch"}
        made = await served.client.post("/adapters", orjson.dumps(content), alias)
        assert (made.status, made.json) == (200, {"status": "Adapter dutch registered"})
        assert "warning" not in made.headers
        assert (await served.client.get("/adapters/component-1")).json["src"] == content["src"]
        gone = await served.client.get("/adapters/component-1", method="DELETE")
        assert (gone.status, gone.json) == (200, {"status": "Adapter component-1 unregistered"})
        made = await served.client.post("/adapters", orjson.dumps({**content, "pin": True}))
        assert (made.status, "pin has no effect" in made.headers["warning"]) == (200, True)


@pytest.mark.parametrize("path", COLLECTIONS)
async def test_a_body_that_would_stop_the_event_loop_is_not_read(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path, path: str
) -> None:
    hosts.features |= {Feature.ADAPTERS}
    async with application(tokenizer, directory=directory, max_request_size=100_000) as served:
        answer = await served.client.post(path, b" " * (SMALL + 1))
        assert (answer.status, str(SMALL) in answer.json["message"]) == (413, True)
        assert (await served.client.post(path, b" " * SMALL)).status == 400
