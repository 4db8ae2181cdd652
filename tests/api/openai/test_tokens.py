from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from djl_trtllm.api import RawRequest
from djl_trtllm.api.openai.tokens import tokenize
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import ServedModel
from tests.api.openai.tool_models import HERMES, TIME, tool_model
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts().installed() as hosts:
        yield hosts


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
