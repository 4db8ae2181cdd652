from __future__ import annotations

import json
import time

from djl_trtllm.api.openai.dialect import OPENAI
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.service import ServedModel
from tests.api.tables import check_descriptions
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time, until

CHAT = b'{"model": "%b", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}'
COMPLETION = b'{"prompt": "the wolf", "max_tokens": 2, "temperature": 0}'


@in_virtual_time
async def test_an_empty_name_and_the_models_own_mean_the_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        for name in (b"", b"story", b"tgi"):
            answer = await served.client.post("/v1/chat/completions", CHAT % name)
            assert (answer.status, json.loads(answer.body)["model"]) == (200, "story")
        answer = await served.client.post("/v1/chat/completions", CHAT % b"hen")
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (404, "model_not_found")
        answer = await served.client.post("/v1/chat/completions", b'{"model": 3}')
        assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "model")


@in_virtual_time
async def test_the_body_chooses_among_models(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        await served.load(tokenizer, "fable")
        answer = await served.client.post("/v1/chat/completions", CHAT % b"fable")
        assert (answer.status, [len(host.submitted) for host in hosts.made]) == (200, [0, 1])
        assert (await served.client.post("/v1/completions", COMPLETION)).status == 404


@in_virtual_time
async def test_models_are_listed(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        served.registry.add(ServedModel("fable", "/fable"))
        listed = json.loads((await served.client.get("/v1/models")).body)
        assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["story", "fable"])
        assert json.loads((await served.client.get("/v1/models/fable")).body) == listed["data"][1]
        assert (await served.client.get("/v1/models/hen")).status == 404
        answer = await served.client.get("/v1/completions")
        assert (answer.status, json.loads(answer.body)["error"]["type"]) == (405, "invalid_request_error")


@in_virtual_time
async def test_a_stream_is_events_and_a_client_that_leaves_cancels(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        body = (CHAT % b"").replace(b"{", b'{"stream": true, ', 1)
        stream = served.client.begin("POST", "/v1/chat/completions", body)
        await until(lambda: bool(hosts.last.submitted))
        hosts.last.step()
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.parts[0].startswith(b'data: {"id":"chatcmpl-')
        stream.leave()
        await stream.end()
        assert hosts.last.cancelled == [hosts.last.submitted[0].request_id]
        hosts.last.send(Delta(hosts.last.submitted[0].request_id, [], None, FinishReason.CANCELLED))


def test_its_paths_are_described() -> None:
    check_descriptions(OPENAI)


@in_virtual_time
async def test_actions_need_one_model_that_is_there(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        ids = tokenizer.encode("the wolf", False)
        body = b'{"prompt": "the wolf", "add_special_tokens": false}'
        assert (await served.client.post("/tokenize", body)).json["tokens"] == ids
        text = await served.client.post("/detokenize", json.dumps({"tokens": ids}).encode())
        assert text.json == {"prompt": tokenizer.decode(ids, False)}
        served.registry.add(ServedModel("fable", "/fable"))
        refused = await served.client.post("/tokenize", body)
        message = "'model' is not given: expected one of story, fable"
        assert (refused.status, refused.json["error"]["message"]) == (404, message)
        loading = await served.client.post("/tokenize", body[:-1] + b', "model": "fable"}')
        assert (loading.status, loading.headers["retry-after"]) == (529, "10")
        assert loading.json["error"]["message"] == "model fable is still loading"


@in_virtual_time
async def test_a_model_is_listed_with_the_time_since_when_it_is_served(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        (model,) = json.loads((await served.client.get("/v1/models")).body)["data"]
        assert 0 <= time.time() - model.pop("created") < 100_000
        assert model == {"id": "story", "object": "model", "owned_by": "djl-trtllm"}
