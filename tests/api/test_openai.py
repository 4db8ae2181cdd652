from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest

from djl_trtllm.api import RawRequest
from djl_trtllm.api.dialects.openai.dialect import OPENAI, detokenize, tokenize
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.service import Model, ServedModel
from tests.api.test_openai_tools import HERMES, TIME, tool_model
from tests.server.application import application
from tests.support.in_process import Hosts, played_model
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


@in_virtual_time
async def test_texts_are_tokenised_and_back(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        answer = json.loads((await served.client.post("/tokenize", b'{"prompt": "the wolf"}')).body)
        ids = tokenizer.encode("the wolf")
        assert (answer["tokens"], answer["count"]) == (ids, len(ids))
        plain = b'{"prompt": "the wolf", "add_special_tokens": false, "return_token_strs": true}'
        answer = json.loads((await served.client.post("/tokenize", plain)).body)
        assert answer["tokens"] == tokenizer.encode("the wolf", False)
        assert answer["token_strs"] == [tokenizer.raw.id_to_token(id_) for id_ in answer["tokens"]]
        body = json.dumps({"tokens": answer["tokens"]}).encode()
        assert json.loads((await served.client.post("/detokenize", body)).body) == {
            "prompt": tokenizer.decode(answer["tokens"], False)
        }
        chat = json.loads(
            (await served.client.post("/tokenize", b'{"messages": [{"role": "user", "content": "Hi"}]}')).body
        )
        text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
        assert chat["tokens"] == tokenizer.encode(text, False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", b"{}"),
        ("/tokenize", b'{"prompt": "a", "messages": []}'),
        ("/tokenize", b'{"prompt": 3}'),
        ("/tokenize", b'{"promt": "a"}'),
        ("/detokenize", b"{}"),
        ("/detokenize", b'{"tokens": [-1]}'),
        ("/detokenize", b'{"tokens": [true]}'),
        ("/detokenize", b'{"tokens": [1], "x": 1}'),
        ("/detokenize", b'{"tokens": [99999999]}'),
    ],
)
@in_virtual_time
async def test_what_is_no_text_and_no_tokens_is_refused(
    hosts: Hosts, tokenizer: Tokenizer, path: str, body: bytes
) -> None:
    async with application(tokenizer) as served:
        answer = await served.client.post(path, body)
        assert (answer.status, json.loads(answer.body)["error"]["type"]) == (400, "invalid_request_error")


@in_virtual_time
async def test_tokenising_needs_a_model_that_is_ready_and_named(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        served.registry.add(ServedModel("fable", "/fable"))
        assert (await served.client.post("/tokenize", b'{"prompt": "a"}')).status == 404
        assert (await served.client.post("/tokenize", b'{"prompt": "a", "model": "fable"}')).status == 529
        assert (await served.client.post("/tokenize", b'{"prompt": "a", "model": "story"}')).status == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", b'{"prompt": "a", "x": 1}'), ("/detokenize", b'{"tokens": [5], "x": 1}')]
)
@in_virtual_time
async def test_unknown_fields_may_be_ignored(hosts: Hosts, tokenizer: Tokenizer, path: str, body: bytes) -> None:
    async with application(tokenizer, unknown_parameters="warn") as served:
        answer = await served.client.post(path, body)
        assert (answer.status, "ignored: x " in answer.headers["warning"]) == (200, True)


def test_tools_are_part_of_the_prompt(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TIME]}
    reply = tokenize(RawRequest(json.dumps(body).encode(), {}), tool_model(tokenizer, HERMES))
    assert '"name": "time"' in tokenizer.decode(json.loads(reply.body)["tokens"])


def text_of(model: Model, *tokens: Any) -> str:
    reply = detokenize(RawRequest(json.dumps({"tokens": tokens}).encode(), {}), model)
    return str(json.loads(reply.body)["prompt"])


def test_every_id_of_the_vocabulary_has_its_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = played_model(tokenizer)
    size = tokenizer.vocab_size
    assert text_of(model, 0, size - 1) == tokenizer.decode([0, size - 1], False)
    for tokens in ([5, -1], [-1, 5], [size], [5, 1.0]):
        with pytest.raises(InvalidRequestError, match=f"expected a list of token ids from 0 to {size - 1}"):
            text_of(model, *tokens)
    for act, body in ((detokenize, b'{"tokens": [5], "x": 1}'), (tokenize, b'{"prompt": "a", "x": 1}')):
        with pytest.raises(InvalidRequestError, match='unknown field "x"'):
            act(RawRequest(body, {}), model)
    monkeypatch.setattr("djl_trtllm.api.dialects.openai.dialect._MOST_IDS", 2)
    text_of(model, 5, 6)
    with pytest.raises(InvalidRequestError, match="expected a list of token ids"):
        text_of(model, 5, 6, 7)


def test_a_chat_gets_its_special_tokens_from_its_template_unless_more_are_wanted(tokenizer: Tokenizer) -> None:
    model = played_model(tokenizer, max_seq_len=77)
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.render_chat(messages)
    for special in (False, True):
        body = {"messages": messages, "add_special_tokens": special}
        answer = json.loads(tokenize(RawRequest(json.dumps(body).encode(), {}), model).body)
        ids = tokenizer.encode(text, special)
        assert answer == {"count": len(ids), "max_model_len": 77, "tokens": ids}


def test_a_token_id_of_a_prompt_is_one_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    model, size = played_model(tokenizer), tokenizer.vocab_size

    def ids_of(*ids: int) -> list[int] | None:
        request = RawRequest(orjson.dumps({"prompt": ids}), {}, "/v1/completions")
        return OPENAI.parse(request, model).requests[0].prompt_ids

    assert ids_of(size - 1, 0) == [size - 1, 0]
    for id_ in (size, -1):
        with pytest.raises(InvalidRequestError, match=f"expected 0 to {size - 1}"):
            ids_of(3, id_)


@pytest.mark.parametrize(
    ("body", "name"), [({}, None), ({"model": None}, None), ({"model": ""}, None), ({"model": "a"}, "a")]
)
def test_the_body_may_name_the_model(body: dict[str, Any], name: str | None) -> None:
    assert OPENAI.model_name(RawRequest(orjson.dumps(body), {})) == name
    with pytest.raises(InvalidRequestError, match="'model' is 0: expected a string"):
        OPENAI.model_name(RawRequest(b'{"model": 0}', {}))
