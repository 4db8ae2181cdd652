"""Which handler gets a request, and the way of a request through a model."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from djl_trtllm.api.lmi.dialect import Lmi
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.service import ServedModel, State
from tests.server.application import application, body
from tests.support.asgi import JSON, lifespan
from tests.support.in_process import PROMPT, Hosts
from tests.support.virtual_time import in_virtual_time, until


def text(tokenizer: Tokenizer, tokens: int) -> str:
    """What the scripted executor makes of the prompt."""
    return tokenizer.decode(tokenizer.encode(PROMPT)[:tokens])


# -- generating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "query", "headers"),
    [
        ("/invocations", "", {}),
        ("/predictions/story", "", {}),
        ("/models/story/invoke", "", {}),
        ("/endpoints/story/invocations", "", {}),
        ("/invocations", "model_name=story", {}),
        ("/invocations", "", {"model_name": "story"}),
        ("/predictions/story", "model_name=fable", {}),
        ("/invocations", "", {"X-Amzn-SageMaker-Target-Model": "story"}),
        ("/endpoints/fable/invocations", "", {"X-Amzn-SageMaker-Target-Model": "story.tar.gz"}),
        ("/models/story/invoke", "", {"X-Amzn-SageMaker-Target-Model": "fable"}),
    ],
)
@in_virtual_time
async def test_every_path_of_a_model_generates(
    hosts: Hosts, tokenizer: Tokenizer, path: str, query: str, headers: dict[str, str]
) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        if path != "/invocations" or query or headers:
            await served.load(tokenizer, "fable")
        answer = await served.client.post(path, body(4), {**JSON, **headers}, query)
        assert (answer.status, answer.json["generated_text"]) == (200, text(tokenizer, 4))
        assert hosts.made[0].submitted != []


@in_virtual_time
async def test_an_endpoints_name_says_nothing_where_there_is_one_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        answer = await served.client.post("/endpoints/any-name/invocations", body())
        assert answer.status == 200
        await served.load(tokenizer, "fable")
        answer = await served.client.post("/endpoints/any-name/invocations", body())
        assert answer.status == 400
        assert answer.headers["x-amzn-errortype"] == "ValidationError"
        route = "/endpoints/{endpoint}/invocations"
        assert served.counts.responses == {(200, route, "story"): 1, (400, route, ""): 1}
        assert answer.json["Message"] == "there is no model named 'any-name' here; loaded: fable, story"


@in_virtual_time
async def test_an_endpoints_openai_body_names_the_model_before_the_endpoint(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        await served.load(tokenizer, "fable")
        for endpoint, model, used in (("story", "fable", 1), ("story", "", 0), ("fable", "tgi", 1)):
            content = orjson.dumps({"model": model, "prompt": "the wolf", "max_tokens": 2})
            before = len(hosts.made[used].submitted)
            answer = await served.client.post(f"/endpoints/{endpoint}/openai/v1/completions", content)
            assert (answer.status, len(hosts.made[used].submitted)) == (200, before + 1)
        content = orjson.dumps({"model": "hen", "prompt": "the wolf"})
        answer = await served.client.post("/endpoints/story/openai/v1/completions", content)
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


@in_virtual_time
async def test_custom_attributes_come_back(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    header = "x-amzn-sagemaker-custom-attributes"
    async with application(tokenizer) as served:
        for value, path, returned in (
            ("trace=1;a", "/invocations", "trace=1;a"),
            ("x" * 1024, "/endpoints/story/invocations-response-stream", "x" * 1024),
            ("x" * 1025, "/invocations", None),
            ("", "/invocations", None),
            ("trace=1", "/generate", None),
        ):
            answer = await served.client.post(path, body(), {header: value})
            assert (answer.status, answer.headers.get(header)) == (200, returned)
        assert header not in (await served.client.post("/invocations", body(0), {header: "trace=1"})).headers


@in_virtual_time
async def test_errors_of_an_endpoint_are_in_sagemakers_shape(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        for content, status in ((b"{", 424), (b" " * 1001, 413)):
            own = await served.client.post("/invocations", content)
            answer = await served.client.post("/endpoints/story/invocations", content)
            assert (own.status, answer.status, answer.json["OriginalStatusCode"]) == (status, 424, status)
            assert answer.headers["x-amzn-errortype"] == "ModelError"
            assert "x-amzn-errortype" not in own.headers
            assert answer.json["OriginalMessage"] == own.body.decode().strip()


@in_virtual_time
async def test_a_stream_has_a_part_for_every_iteration(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/invocations", body(3, stream=True))
        await until(lambda: bool(hosts.last.submitted))
        for parts in (1, 2, 3):
            assert not stream.complete
            hosts.last.step()
            assert len(stream.parts) == parts
        await stream.end()
        assert stream.complete
        assert stream.lines[-1]["generated_text"] == text(tokenizer, 3)


@in_virtual_time
async def test_an_answer_is_complete_with_all_its_sequences(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        answer = served.client.begin("POST", "/invocations", body(2, n=2, do_sample=True, details=True))
        await until(lambda: len(hosts.last.submitted) == 2)
        hosts.last.send(Delta(0, [5, 6], None, FinishReason.LENGTH))
        await asyncio.sleep(0)
        assert not answer.done()
        hosts.last.send(Delta(1, [5, 6], None, FinishReason.LENGTH))
        await answer.end()
        assert len(answer.json["details"]["best_of_sequences"]) == 1


@in_virtual_time
async def test_a_body_is_read_by_its_content_type(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        answer = await served.client.post("/invocations", b"a wolf", {"content-type": "text/plain"})
        assert answer.status == 200
        answer = await served.client.post("/invocations", b"a wolf")
        assert answer.status == 424


@in_virtual_time
async def test_a_request_goes_to_the_worker_with_the_least_to_do(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, workers=2) as served:
        streams = [served.client.begin("POST", "/invocations", body(1)) for _ in range(2)]
        await until(lambda: all(host.submitted for host in hosts.made))
        for host in hosts.made:
            host.step()
        for stream in streams:
            await stream.end()


@in_virtual_time
async def test_a_client_that_leaves_is_cancelled(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/invocations", body(100, stream=True))
        await until(lambda: bool(hosts.last.submitted))
        hosts.last.step()
        stream.leave()
        await stream.end()
        assert hosts.last.cancelled == [hosts.last.submitted[0].request_id]
        hosts.last.step()
        assert served.registry.models["story"].workers[0].load_now == 0


@in_virtual_time
async def test_a_handler_that_is_cancelled_cancels_its_generation(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        stream = served.client.begin("POST", "/invocations", body(100, stream=True))
        await until(lambda: bool(hosts.last.submitted))
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream.end()
        assert len(hosts.last.cancelled) == 1


@in_virtual_time
async def test_a_client_that_leaves_in_the_middle_of_its_body_is_not_answered(
    hosts: Hosts, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with application(tokenizer) as served:
        request = served.client.begin("POST", "/invocations", None)
        request.upload(body()[:9], more=True)
        request.leave()
        await request.end()
        assert (request.sent, caplog.records, hosts.last.submitted) == ([], [], [])


# -- refusing ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_request_for_no_model_names_those_that_are_there(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application() as served:
        answer = await served.client.post("/invocations", body())
        assert (answer.status, answer.json["message"]) == (400, "Parameter model_name is required; loaded: none")
        for name in ("wolf", "fox"):
            await served.load(tokenizer, name)
        answer = await served.client.post("/invocations", body())
        assert (answer.status, answer.json["message"]) == (400, "Parameter model_name is required; loaded: fox, wolf")


@pytest.mark.parametrize(
    ("path", "query"), [("/predictions/hen", "model_name=cat"), ("/invocations", "model_name=hen")]
)
@in_virtual_time
async def test_an_unknown_model_is_named(hosts: Hosts, tokenizer: Tokenizer, path: str, query: str) -> None:
    async with application(tokenizer) as served:
        answer = await served.client.post(path, body(), query=query)
        assert (answer.status, answer.json["message"]) == (404, "there is no model named 'hen' here; loaded: story")


@pytest.mark.parametrize(("size", "status"), [(1000, 424), (1001, 413)])
@in_virtual_time
async def test_a_body_above_the_limit_is_413(hosts: Hosts, tokenizer: Tokenizer, size: int, status: int) -> None:
    async with application(tokenizer) as served:
        answer = await served.client.post("/invocations", b" " * size)
        assert answer.status == status
        if status == 413:
            assert answer.json["message"] == "the request body is larger than max_request_size=1000 bytes"


@in_virtual_time
async def test_a_model_that_loads_refuses_with_the_time_to_come_again(hosts: Hosts) -> None:
    async with application() as served:
        served.registry.add(ServedModel("story", "/story"))
        answer = await served.client.post("/invocations", body())
        assert (answer.status, answer.headers["retry-after"]) == (529, "10")
        assert "connection" not in answer.headers


@in_virtual_time
async def test_a_model_that_ends_tells_clients_to_go_elsewhere(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        served.registry.models["story"].refuse_new()
        answer = await served.client.begin("POST", "/invocations", None).end()
        assert (answer.status, answer.headers["connection"]) == (529, "close")
        assert answer.json["message"] == "model story is shutting down"


# -- what is no request of a model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", ["/nowhere", "/ping/", "/invocations/", "/predictions/a/b"])
@in_virtual_time
async def test_an_unknown_path_is_404_in_djls_shape(method: str, path: str) -> None:
    async with application() as served:
        answer = await served.client.get(path, method=method)
        assert (answer.status, served.counts.responses) == (404, {(404, "unknown", ""): 1})
        assert answer.json == {
            "code": 404,
            "type": "ResourceNotFoundException",
            "message": f"there is nothing at {path}",
        }


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/invocations", "POST"),
        ("HEAD", "/invocations", "POST"),
        ("PUT", "/predictions/story", "POST"),
        ("GET", "/models/story/invoke", "POST"),
        ("GET", "/endpoints/story/invocations", "POST"),
        ("PUT", "/ping", "GET, POST"),
        ("POST", "/metrics", "GET"),
        ("DELETE", "/metrics", "GET"),
    ],
)
@in_virtual_time
async def test_a_wrong_method_is_405_and_names_the_right_one(method: str, path: str, allow: str) -> None:
    async with application() as served:
        answer = await served.client.get(path, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, allow)
        assert answer.json["message"] == f"{path} takes {allow}, not {method}"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/ping", "/metrics", "/prometheus/metrics", "/models"])
@in_virtual_time
async def test_pages_take_get_and_head(method: str, path: str) -> None:
    async with application() as served:
        assert (await served.client.get(path, method=method)).status == 200


@in_virtual_time
async def test_metrics_show_what_was_answered() -> None:
    async with application() as served:
        await served.client.get("/nowhere")
        page = await served.client.get("/metrics")
        assert b'djl_trtllm_http_responses_total{model="",route="unknown",status="404"} 1.0' in page.body


@pytest.mark.parametrize("path", ["/models/story", "/models/story/adapters", "/adapters", "/adapters/dutch"])
@in_virtual_time
async def test_management_has_its_handlers(hosts: Hosts, tokenizer: Tokenizer, path: str) -> None:
    async with application(tokenizer) as served:
        answer = await served.client.get(path)
        assert b"there is nothing at" not in answer.body


@in_virtual_time
async def test_the_application_has_a_life() -> None:
    async with application() as served:
        async with lifespan(served.app):
            assert served.lives == ["begun"]
        assert served.lives == ["begun", "ended"]


# -- /ping -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "status", "words"),
    [
        ([], 200, []),
        ([State.READY], 200, ["Healthy"]),
        ([State.LOADING], 503, ["PENDING"]),
        ([State.RECOVERING], 503, ["Unhealthy"]),
        ([State.DRAINING], 503, ["Unhealthy"]),
        ([State.STOPPED], 503, ["Unhealthy"]),
        ([State.FAILED], 500, ["FAILED"]),
        ([State.READY, State.LOADING], 503, ["Healthy", "PENDING"]),
        ([State.LOADING, State.FAILED, State.READY], 500, ["PENDING", "FAILED", "Healthy"]),
    ],
)
@in_virtual_time
async def test_ping_is_200_when_every_model_of_the_start_is_ready(
    states: list[State], status: int, words: list[str]
) -> None:
    async with application() as served:
        for number, state in enumerate(states):
            model = ServedModel(f"m{number}", "/")
            model.workers[0].state = state
            served.registry.add(model)
        answer = await served.client.get("/ping")
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
        assert answer.json == {f"m{number}": {"status": word} for number, word in enumerate(words)}
        posted = await served.client.post("/ping")
        assert (posted.status, posted.json) == (status, answer.json)


@in_virtual_time
async def test_models_that_were_registered_later_do_not_make_a_server_ill() -> None:
    async with application() as served:
        served.registry.add(ServedModel("later", "/", at_startup=False))
        answer = await served.client.get("/ping")
        assert (answer.status, answer.json) == (200, {"later": {"status": "PENDING"}})


# -- defects -----------------------------------------------------------------------------------------------------------


def broken(*_: object) -> None:
    raise KeyError("secret")


@in_virtual_time
async def test_a_defect_before_the_answer_is_500_and_in_the_log(
    hosts: Hosts, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with application(tokenizer) as served:
        with monkeypatch.context() as patched:
            patched.setattr(Lmi, "parse", broken)
            answer = await served.client.post("/invocations", body(), {**JSON, "X-Request-Id": "story-1"})
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert "the request failed" in caplog.text and "secret" in caplog.text


@in_virtual_time
async def test_a_defect_in_an_answer_is_the_servers_to_end(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(self: Exchange, *_: object) -> None:
        await self.begin(200, "text/plain", 9)
        raise DjlTrtllmError("half of it")

    async with application(tokenizer) as served:
        with monkeypatch.context() as patched:
            patched.setattr(Exchange, "reply", half)
            with pytest.raises(DjlTrtllmError, match="half of it"):
                await served.client.get("/ping")
