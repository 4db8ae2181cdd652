from __future__ import annotations

from djl_trtllm.api.dialects.tgi import Timing, stream_headers
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, SequenceResult
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.virtual_time import Clock, in_virtual_time

BODY = b'{"inputs": "the wolf", "parameters": {"max_new_tokens": 2}}'


@in_virtual_time
async def test_the_root_takes_get_for_people_and_post_for_clients(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        about = (await served.client.get("/")).json
        assert (about["name"], [model["name"] for model in about["models"]]) == ("djl-trtllm", ["story"])
        refused = await served.client.get("/", method="PUT")
        assert (refused.status, refused.headers["allow"]) == (405, "GET, POST")


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
