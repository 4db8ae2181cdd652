from __future__ import annotations

import json
from typing import Any

import pytest

from djl_trtllm.api import RawRequest
from djl_trtllm.api.openai.tokens import detokenize, tokenize
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import Model, ServedModel
from tests.api.openai.tool_models import HERMES, TIME, tool_model
from tests.server.application import application
from tests.support.in_process import Hosts, played_model
from tests.support.virtual_time import in_virtual_time


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
    monkeypatch.setattr("djl_trtllm.api.openai.tokens._MOST_IDS", 2)
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
