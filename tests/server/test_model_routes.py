"""Models that are listed, described, scaled and unregistered over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import ServedModel, State
from tests.server.application import application, body
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time, until


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@in_virtual_time
async def test_models_are_listed(hosts: Hosts, tokenizer: Tokenizer, method: str) -> None:
    async with application(tokenizer) as served:
        served.registry.add(ServedModel("fable", "/store/fable"))
        answer = await served.client.get("/models", method=method)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json == {
            "models": [
                {"modelName": "story", "modelUrl": "/story", "status": "READY"},
                {"modelName": "fable", "modelUrl": "/store/fable", "status": "LOADING"},
            ]
        }


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@in_virtual_time
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


@in_virtual_time
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


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@in_virtual_time
async def test_an_unknown_model_is_404(method: str) -> None:
    async with application() as served:
        answer = await served.client.get("/models/hen", method=method)
        assert (answer.status, answer.json["message"]) == (404, "there is no model named 'hen' here")


@pytest.mark.parametrize(
    ("path", "allow", "told"),
    [
        ("/models", "GET, POST", "this takes GET and POST"),
        ("/models/story", "GET, PUT, DELETE", "this takes GET, PUT and DELETE"),
    ],
)
@in_virtual_time
async def test_a_wrong_method_is_405_and_names_the_right_ones(path: str, allow: str, told: str) -> None:
    async with application() as served:
        served.registry.add(ServedModel("story", "/story"))
        answer = await served.client.get(path, method="PATCH")
        assert (answer.status, answer.headers["allow"], answer.json["message"]) == (405, allow, told)
        assert answer.json["type"] == "MethodNotAllowedException"


# -- scaling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "workers", "most"),
    [
        ("min_worker=3", 3, 3),
        ("min_worker=1&max_worker=5", 1, 5),
        ("min_worker=2&max_worker=2", 2, 2),
        ("max_worker=4", 2, 4),
        ("", 2, 2),
    ],
)
@in_virtual_time
async def test_a_model_is_scaled(hosts: Hosts, tokenizer: Tokenizer, query: str, workers: int, most: int) -> None:
    async with application(tokenizer, workers=2) as served:
        answer = await served.client.get("/models/story", query, method="PUT")
        status = f'Model "story" worker scaled. New Worker configuration min workers:{workers} max workers:{most}'
        assert (answer.status, answer.json) == (200, {"status": status})
        assert len(served.registry.models["story"].workers) == workers


@in_virtual_time
async def test_sixty_four_workers_are_the_most(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        answer = await served.client.get("/models/story", "max_worker=64", method="PUT")
        assert answer.status == 200


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("min_worker=many", "min_worker is 'many': expected a whole number up to 64"),
        ("max_worker=-1", "max_worker is '-1': expected a whole number up to 64"),
        ("min_worker=65", "min_worker is '65': expected a whole number up to 64"),
        ("min_worker=65&max_worker=66", "min_worker is '65': expected a whole number up to 64"),
        ("min_worker=", "min_worker is '': expected a whole number up to 64"),
        ("min_worker=0", "min_worker=0 and max_worker=0: expected 1 <= min_worker <= max_worker"),
        ("min_worker=3&max_worker=2", "min_worker=3 and max_worker=2: expected 1 <= min_worker <= max_worker"),
        ("max_worker=0", "min_worker=1 and max_worker=0: expected 1 <= min_worker <= max_worker"),
    ],
)
@in_virtual_time
async def test_wrong_numbers_of_workers_are_reported(hosts: Hosts, tokenizer: Tokenizer, query: str, told: str) -> None:
    async with application(tokenizer) as served:
        answer = await served.client.get("/models/story", query, method="PUT")
        assert (answer.status, answer.json["message"]) == (400, told)
        assert len(hosts.made) == 1


@in_virtual_time
async def test_a_model_is_scaled_when_it_is_ready(hosts: Hosts) -> None:
    async with application() as served:
        served.registry.add(ServedModel("story", "/story"))
        answer = await served.client.get("/models/story", "min_worker=2", method="PUT")
        assert (answer.status, answer.json["message"]) == (409, "model story is loading: it is scaled when it is ready")


@in_virtual_time
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


@in_virtual_time
async def test_a_server_without_a_store_keeps_its_models(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        refused = await served.client.get("/models/story", method="DELETE")
        assert (refused.status, refused.headers["allow"]) == (405, "GET, PUT")
        assert "--model-store DIR (SERVING_MODEL_STORE)" in refused.json["message"]
        assert (await served.client.get("/ping")).json == {"story": {"status": "Healthy"}}


@pytest.mark.parametrize(
    ("source", "at_startup", "status"),
    [
        ("/elsewhere/story", True, 503),
        ("/store/story", True, 200),
        ("story", True, 200),
        ("/elsewhere/story", False, 200),
    ],
)
@in_virtual_time
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


@in_virtual_time
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


@in_virtual_time
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


@in_virtual_time
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
