"""Models that are registered over HTTP, from the model store and from nowhere else."""

from __future__ import annotations

import asyncio
import json
import tarfile
import threading
from pathlib import Path

import pytest

from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.model import Tokenizer
from djl_trtllm.server import model_routes
from djl_trtllm.service import Model, State
from djl_trtllm.service.model import ModelSource
from tests.server.application import Application, application, body
from tests.support.asgi import Connection
from tests.support.in_process import Hosts, played_model
from tests.support.models import scripted_model
from tests.support.virtual_time import in_virtual_time, until


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder with a model."""
    scripted_model(tmp_path / "store" / "red")
    scripted_model(tmp_path / "outside")
    return tmp_path / "store"


async def register(served: Application, query: str, body: bytes = b"") -> Connection:
    return await served.client.post("/models", body, query=query)


@in_virtual_time
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
@in_virtual_time
async def test_a_model_may_be_named_by_path_and_address(hosts: Hosts, store: Path, form: str) -> None:
    async with application(store=store) as served:
        assert (await register(served, f"url={form.format(store=store)}")).status == 200
        assert list(served.registry.models) == ["red"]


@in_virtual_time
async def test_sagemaker_registers_with_json(hosts: Hosts, store: Path) -> None:
    async with application(store=store) as served:
        given = {"model_name": "m1", "url": str(store / "red"), "min_worker": None, "initial_workers": 2}
        assert (await register(served, "", json.dumps(given).encode())).status == 200
        assert len(served.registry.models["m1"].workers) == 2
        # What the query says wins.
        assert (await register(served, "model_name=m2&min_worker=1", json.dumps(given).encode())).status == 200
        assert len(served.registry.models["m2"].workers) == 1


@in_virtual_time
async def test_an_archive_has_the_name_before_its_suffix(
    hosts: Hosts, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJL_CACHE_DIR", str(tmp_path / "cache"))
    with tarfile.open(store / "packed.tar.gz", "w:gz", dereference=True) as archive:
        archive.add(store / "red", arcname=".")
    async with application(store=store) as served:
        assert (await register(served, "url=packed.tar.gz")).status == 200
        assert list(served.registry.models) == ["packed"]


@pytest.mark.parametrize(
    ("query", "workers"),
    [
        ("", 1),
        ("&min_worker=3", 3),
        ("&initial_workers=2", 2),
        ("&min_worker=3&initial_workers=2", 3),
        ("&min_worker=0", 1),
    ],
)
@in_virtual_time
async def test_a_model_is_registered_with_workers(hosts: Hosts, store: Path, query: str, workers: int) -> None:
    async with application(store=store) as served:
        await register(served, f"url=red{query}")
        assert len(served.registry.models["red"].workers) == workers


@in_virtual_time
async def test_the_model_that_the_server_was_started_with_is_not_the_models(
    hosts: Hosts, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODEL_ID", str(tmp_path / "nowhere"))
    monkeypatch.setenv("OPTION_PREDICT_TIMEOUT", "77")
    async with application(store=store) as served:
        assert (await register(served, "url=red")).status == 200
        assert served.registry.models["red"].model.config.options.predict_timeout == 77


# -- refusing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "content", "status", "told"),
    [
        ("", b"", 400, "Parameter url is required."),
        ("url=", b"", 400, "Parameter url is required."),
        ("url=blue", b"", 404, "there is no 'blue' in the model store"),
        ("url=../outside", b"", 400, "'../outside' is not in the model store: models are registered from there only"),
        ("url=.", b"", 400, "'.' is not in the model store: models are registered from there only"),
        ("url=/", b"", 400, "'/' is not in the model store: models are registered from there only"),
        ("url=red&min_worker=many", b"", 400, "min_worker is 'many': expected a whole number up to 64"),
        ("url=red&initial_workers=many", b"", 400, "initial_workers is 'many': expected a whole number up to 64"),
        ("url=red", b"{", 400, "the body is not JSON: "),
        ("url=red", b"[1]", 400, "the body must be a JSON object with model_name and url"),
        ("url=red", b" " * 1001, 413, "the request body is larger than max_request_size=1000 bytes"),
    ],
)
@in_virtual_time
async def test_what_cannot_be_registered_is_reported(
    hosts: Hosts, store: Path, query: str, content: bytes, status: int, told: str
) -> None:
    async with application(store=store) as served:
        answer = await register(served, query, content)
        assert answer.status == status
        assert answer.json["message"] == told or (told.endswith(": ") and answer.json["message"].startswith(told))
        assert (served.registry.models, hosts.made) == ({}, [])


@in_virtual_time
async def test_without_a_store_nothing_is_registered(hosts: Hosts) -> None:
    async with application() as served:
        answer = await register(served, "url=red")
        assert answer.status == 400
        assert answer.json["message"] == (
            "this server registers no models: start it with --model-store DIR (SERVING_MODEL_STORE)"
        )


@in_virtual_time
async def test_a_name_is_taken_once(hosts: Hosts, store: Path) -> None:
    async with application(store=store) as served:
        await register(served, "url=red")
        answer = await register(served, "url=red")
        told = "there is a model named 'red' already: unregister it first"
        assert (answer.status, answer.json["message"]) == (409, told)
        assert len(hosts.made) == 1


@pytest.mark.parametrize(("reason", "status"), [("no such engine", 500), ("CUDA error: Out of Memory", 507)])
@in_virtual_time
async def test_a_model_that_does_not_load_is_not_registered(
    hosts: Hosts, store: Path, reason: str, status: int
) -> None:
    hosts.failures = [None, ExecutorStartError(reason)]
    async with application(store=store) as served:
        answer = await register(served, "url=red&min_worker=2")
        assert (answer.status, answer.json["type"], answer.json["message"]) == (status, "ModelException", reason)
        assert served.registry.models == {}
        assert hosts.made[0].closed


@in_virtual_time
async def test_a_defect_is_no_secret_and_in_the_log(
    hosts: Hosts, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(source: ModelSource) -> Model:
        raise KeyError("tokenizer")

    monkeypatch.setattr(model_routes, "prepare", prepare)
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
@in_virtual_time
async def test_a_registration_in_the_background_answers_at_once(slow: Hosts, store: Path, word: str) -> None:
    async with application(store=store) as served:
        answer = await register(served, f"url=red&synchronous={word}")
        assert (answer.status, answer.json) == (202, {"status": 'Model "red" registration scheduled.'})
        model = served.registry.models["red"]
        assert model.state is State.LOADING
        await until(lambda: model.state is State.READY)


@in_virtual_time
async def test_a_model_that_fails_in_the_background_stays_and_says_why(slow: Hosts, store: Path) -> None:
    slow.failures = [ExecutorStartError("no such engine")]
    async with application(store=store) as served:
        await register(served, "url=red&synchronous=false")
        await until(lambda: served.registry.models["red"].state is State.FAILED)
        (described,) = (await served.client.get("/models/red")).json[0]["models"]
        assert described["failure"] == "no such engine"


@in_virtual_time
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


@in_virtual_time
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


@in_virtual_time
async def test_the_end_of_the_server_ends_what_loads(slow: Hosts, store: Path) -> None:
    async with application(store=store) as served:
        await register(served, "url=red&synchronous=false")
        await begun(slow)
        before = asyncio.get_running_loop().time()
        await served.models.close()
        assert slow.last.closed
        assert asyncio.get_running_loop().time() - before < 1


@in_virtual_time
async def test_work_that_is_done_is_forgotten(
    hosts: Hosts, tokenizer: Tokenizer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    def prepare(source: ModelSource) -> Model:
        assert free.wait(60)
        return played_model(tokenizer)

    monkeypatch.setattr(model_routes, "prepare", prepare)
    async with application(store=store) as served:
        await register(served, "url=red&synchronous=false")
        assert list(served.models._work) == ["red"]
        free.set()
        await until(lambda: served.registry.models["red"].state is State.READY)
        await asyncio.sleep(0)
        assert served.models._work == {}
