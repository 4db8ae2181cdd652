from __future__ import annotations

import pytest

from djl_trtllm.api.dialects.tgi import Timing, stream_headers
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, SequenceResult
from djl_trtllm.service import ServedModel
from djl_trtllm.version import __version__
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time

BODY = b'{"inputs": "the wolf", "parameters": {"max_new_tokens": 2}}'


@in_virtual_time
async def test_generate_answers_an_object_and_the_root_a_list(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        text = tokenizer.decode(tokenizer.encode("the wolf")[:2])
        assert (await served.client.post("/generate", BODY)).json == {"generated_text": text}
        answer = await served.client.post("/", BODY)
        assert answer.body.decode() == f'[{{"generated_text":"{text}"}}]'


@in_virtual_time
async def test_the_root_takes_get_for_people_and_post_for_clients(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        about = (await served.client.get("/")).json
        assert (about["name"], [model["name"] for model in about["models"]]) == ("djl-trtllm", ["story"])
        refused = await served.client.get("/", method="PUT")
        assert (refused.status, refused.headers["allow"]) == (405, "GET, POST")


@in_virtual_time
async def test_health_and_info(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, max_input_len=77, max_seq_len=99, job_queue_size=5) as served:
        healthy = await served.client.get("/health")
        assert (healthy.status, healthy.body) == (200, b"")
        assert (await served.client.get("/info")).json == {
            "model_id": "story",
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": 5,
            "max_best_of": 16,
            "max_stop_sequences": 64,
            "max_input_tokens": 77,
            "max_total_tokens": 99,
            "router": "djl-trtllm",
            "version": __version__,
        }
        served.registry.add(ServedModel("fable", "/fable"))
        unhealthy = await served.client.get("/health")
        assert (unhealthy.status, unhealthy.json) == (503, {"error": "unhealthy", "error_type": "healthcheck"})
        refused = await served.client.get("/info")
        message = "/info describes the only model; loaded: story, fable"
        assert (refused.status, refused.json["error"]) == (404, message)
    async with application() as served:
        served.registry.add(ServedModel("fable", "/fable"))
        loading = await served.client.get("/info")
        assert (loading.status, loading.json["error"]) == (503, "model fable is still loading")
        assert loading.headers["retry-after"] == "10"


@in_virtual_time
async def test_whole_answers_are_timed_in_headers_and_streams_say_what_is_known(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        for path in ("/generate", "/"):
            headers = (await served.client.post(path, BODY)).headers
            assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == (
                str(len(tokenizer.encode("the wolf"))),
                "2",
            )
            assert headers["x-compute-characters"] == "8" and float(headers["x-compute-time"]) >= 0
            for name in ("total", "validation", "queue", "inference"):
                assert int(headers[f"x-{name}-time"]) >= 0
            assert int(headers["x-time-per-token"]) >= 0
        headers = (await served.client.post("/generate_stream", BODY)).headers
        assert (headers["x-compute-characters"], headers["x-accel-buffering"]) == ("8", "no")
        assert "x-compute-time" not in headers


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ended(tokens: int, queue_seconds: float = 0.0) -> SequenceResult:
    return SequenceResult(FinishReason.LENGTH, tokens, None, None, queue_seconds=queue_seconds)


def test_a_request_is_timed_part_by_part() -> None:
    clock = Clock()
    timing = Timing(11, clock)
    clock.now += 0.25
    timing.tokenised(4)
    clock.now += 1.5
    assert dict(timing.headers(ended(10, 0.5))) == {
        "x-compute-time": "1.750000",
        "x-compute-characters": "11",
        "x-total-time": "1750",
        "x-validation-time": "250",
        "x-queue-time": "500",
        "x-inference-time": "1000",
        "x-time-per-token": "100",
        "x-prompt-tokens": "4",
        "x-generated-tokens": "10",
    }


def test_an_output_without_tokens_is_timed_too() -> None:
    clock = Clock()
    timing = Timing(1, clock)
    timing.tokenised(1)
    clock.now += 2.0
    headers = dict(timing.headers(ended(0, 3.0)))
    assert (headers["x-inference-time"], headers["x-time-per-token"], headers["x-generated-tokens"]) == ("0", "0", "0")
    headers = dict(timing.headers(ended(0)))
    assert (headers["x-inference-time"], headers["x-time-per-token"]) == ("2000", "2000")


def test_a_stream_has_what_is_known_when_it_begins() -> None:
    assert dict(stream_headers(7)) == {"x-compute-characters": "7", "x-accel-buffering": "no"}


def test_what_did_not_happen_took_no_time() -> None:
    headers = dict(Timing(1, Clock()).headers(ended(1)))
    assert (headers["x-validation-time"], headers["x-prompt-tokens"]) == ("0", "0")


@pytest.mark.parametrize("path", ["/predict", "/v1/models/model:predict", "/v1/models/story:predict"])
@in_virtual_time
async def test_every_name_of_the_model_predicts_in_trusss_api(hosts: Hosts, tokenizer: Tokenizer, path: str) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        answer = await served.client.post(path, b'{"prompt": "the wolf", "max_tokens": 2, "stream": false}')
        assert (answer.status, answer.json) == (200, {"text": tokenizer.decode(tokenizer.encode("the wolf")[:2])})


@in_virtual_time
async def test_trusss_readiness_is_that_of_the_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        assert (await served.client.get("/v1/models/model/loaded")).status == 200
        served.registry.add(ServedModel("fable", "/fable"))
        assert (await served.client.get("/v1/models/fable/loaded")).status == 503
        answer = await served.client.get("/v1/models/hen/loaded")
        assert (answer.status, list(answer.json)) == (404, ["error"])
