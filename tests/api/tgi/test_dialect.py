from __future__ import annotations

from djl_trtllm.api.tgi.dialect import TGI
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import ServedModel
from djl_trtllm.version import __version__
from tests.api.tables import check_descriptions
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


def test_its_paths_are_described() -> None:
    check_descriptions(TGI)
