from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest

from djl_trtllm.api.base import RawRequest
from djl_trtllm.api.dialects.openai.dialect import CHAT_FIELDS, OPENAI, detokenize, parameters, tokenize
from djl_trtllm.backends.scripted.executor import FEATURES as SCRIPTED
from djl_trtllm.backends.vllm import executor as vllm
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.executor.protocol import GUIDES, Feature
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FIELDS, FinishReason
from djl_trtllm.service.model import Model
from tests.api.test_openai_tools import HERMES, TIME, tool_model
from tests.server.application import application
from tests.support.in_process import Hosts, played_model
from tests.support.steps import Delta
from tests.support.tables import table
from tests.support.virtual_time import in_virtual_time, until

FEATURES_OF = {
    "no feature": frozenset({"max_new_tokens", "do_sample", "temperature", "top_p"}),
    "scripted": SCRIPTED,
    "regular expressions": SCRIPTED | {Feature.REGEX},
    "vLLM": vllm.FEATURES | GUIDES,
    "all but guides": frozenset({*FIELDS, *Feature}) - {*GUIDES, Feature.ADAPTERS, "beam_width"},
}
VALUES, BESIDE = table(__file__, "VALUES"), table(__file__, "BESIDE")
PLAIN: tuple[str, dict[str, Any]] = ("completions", {"prompt": "the wolf"})
CHAT = b'{"model": "%b", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}'


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
@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_has_what_drafts_proposed_and_the_model_took_and_did_not_take(
    stream: bool, hosts: Hosts, tokenizer: Tokenizer
) -> None:
    async with application(tokenizer) as served:
        body = {"prompt": "the wolf", "n": 2, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        answer = served.client.begin("POST", "/v1/completions", json.dumps(body).encode())
        await until(lambda: len(hosts.last.submitted) == 2)
        for number, request in enumerate(hosts.last.submitted):
            delta = Delta(request.request_id, [5, 6, 7], None, FinishReason.LENGTH, None, 0, 2, 4 + number)
            hosts.last.send(delta)
        text = (await answer.end()).body.decode()
        found = json.loads(text.split("data: ")[-2] if stream else text)["usage"]
        assert found["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 5}


@in_virtual_time
async def test_a_model_is_listed_with_the_time_since_when_it_is_served(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        (model,) = json.loads((await served.client.get("/v1/models")).body)["data"]
        assert 0 <= time.time() - model.pop("created") < 100_000
        assert model.items() >= {"id": "story", "object": "model", "owned_by": "djl-trtllm"}.items()


@in_virtual_time
@pytest.mark.parametrize("features", FEATURES_OF.values(), ids=FEATURES_OF)
async def test_what_a_model_lists_as_supported_is_served_and_the_rest_refused(
    features: frozenset[str], hosts: Hosts, tokenizer: Tokenizer
) -> None:
    hosts.features, hosts.alone = features, True
    async with application(tokenizer) as served:
        model = json.loads((await served.client.get("/v1/models/story")).body)
        supported, refused = model["supported_parameters"], model["unsupported_parameters"]
        assert not set(supported) & set(refused) and {"temperature", "stop", "stream", "max_tokens"} < {*supported}
        assert sorted(supported) == supported and all(refused.values())
        for name in (*supported, *refused):
            chat = name in CHAT_FIELDS.rows
            path, body = ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}) if chat else PLAIN
            body = {"max_tokens": 5, **body, **BESIDE.get(name, {}), name: VALUES.get(name, "x")}
            response = await served.client.begin("POST", f"/v1/{path}", json.dumps(body).encode()).end()
            assert (response.status, name) == (200 if name in supported else 400, name), response.body


@pytest.mark.parametrize(
    ("template", "tools", "choice"),
    [
        (HERMES, "", ""),
        ("{{ tools }}", "the model's chat template does not show", ""),
        ("{{ messages }}", "the model's chat template has no place", "the model's chat template has no place"),
    ],
)
def test_tools_are_listed_as_the_chat_template_has_them(
    template: str, tools: str, choice: str, tokenizer: Tokenizer
) -> None:
    found = parameters({}, tool_model(tokenizer, template))
    for name, reason in (("tools", tools), ("tool_choice", choice)):
        assert found[name].startswith(reason) and bool(found[name]) is bool(reason)
    assert found["temperature"] == "" and found["suffix"] and "user" not in found and "messages" not in found


def test_tools_are_part_of_the_prompt(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TIME]}
    reply = tokenize(RawRequest(json.dumps(body).encode(), {}), tool_model(tokenizer, HERMES))
    assert '"name": "time"' in tokenizer.decode(json.loads(reply.body)["tokens"])


def text_of(model: Model, *tokens: Any) -> str:
    reply = detokenize(RawRequest(json.dumps({"tokens": tokens}).encode(), {}), model)
    return str(json.loads(reply.body)["prompt"])


def test_every_id_of_the_vocabulary_has_its_text(tokenizer: Tokenizer) -> None:
    model = played_model(tokenizer)
    size = tokenizer.vocab_size
    assert text_of(model, 0, size - 1) == tokenizer.decode([0, size - 1], False)
    for tokens in ([5, -1], [-1, 5], [size], [5, 1.0]):
        with pytest.raises(InvalidRequestError, match=f"expected a list of token ids from 0 to {size - 1}"):
            text_of(model, *tokens)
    for act, body in ((detokenize, b'{"tokens": [5], "top_k": 1}'), (tokenize, b'{"prompt": "a", "top_k": 1}')):
        with pytest.raises(InvalidRequestError, match='unknown field "top_k"'):
            act(RawRequest(body, {}), model)
    with pytest.raises(InvalidRequestError, match="too much JSON to read"):
        text_of(model, *[5] * 2**20)


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

    def ids_of(*ids: Any) -> list[int] | None:
        request = RawRequest(orjson.dumps({"prompt": ids}), {}, "/v1/completions")
        return OPENAI.parse(request, model).requests[0].prompt_ids

    assert ids_of(size - 1, 0) == [size - 1, 0]
    for wrong, shown in ((size, str(size)), (-1, "-1"), ("a", '"a"'), (True, "true"), ([3], r"\[3\]")):
        with pytest.raises(InvalidRequestError, match=f"'prompt' has {shown}: .* ids from 0 to {size - 1}"):
            ids_of(3, wrong)


@pytest.mark.parametrize(
    ("body", "name"), [({}, None), ({"model": None}, None), ({"model": ""}, None), ({"model": "a"}, "a")]
)
def test_the_body_may_name_the_model(body: dict[str, Any], name: str | None) -> None:
    assert OPENAI.model_name(RawRequest(orjson.dumps(body), {})) == name
    with pytest.raises(InvalidRequestError, match="'model' is 0: expected a string"):
        OPENAI.model_name(RawRequest(b'{"model": 0}', {}))
