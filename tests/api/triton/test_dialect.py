from __future__ import annotations

from djl_trtllm.api.triton.dialect import TRITON
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import ServedModel
from tests.api.tables import check_descriptions
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time

BODY = b'{"text_input": "the wolf", "max_tokens": 2}'
PARTS = ("preprocessing", "postprocessing", "tensorrt_llm")


@in_virtual_time
async def test_every_name_of_the_only_model_answers_under_that_name(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        for name in ("ensemble", "tensorrt_llm_bls", "story"):
            for path in (f"/v2/models/{name}/generate", f"/v2/models/{name}/versions/1/generate"):
                answer = await served.client.post(path, BODY, {"content-type": "text/plain"})
                assert (answer.status, answer.json["model_name"]) == (200, name)
                assert answer.json["text_output"] == tokenizer.decode(tokenizer.encode("the wolf")[:2])


@in_virtual_time
async def test_versions_and_parts_and_other_models_are_errors(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        for path, status in (
            ("/v2/models/ensemble/versions/2/generate", 404),
            ("/v2/models/hen/generate", 404),
            *((f"/v2/models/{part}/infer", 400) for part in PARTS),
        ):
            answer = await served.client.post(path, BODY)
            assert (answer.status, list(answer.json)) == (status, ["error"])
        assert (await served.client.get("/v2/models/ensemble/generate")).status == 405


@in_virtual_time
async def test_health_is_a_status_without_a_body(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        paths = [
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/ensemble/ready",
            "/v2/models/story/versions/1/ready",
        ]
        for path in (*paths, *(f"/v2/models/{part}/ready" for part in PARTS)):
            answer = await served.client.get(path)
            assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"", "text/plain")
        assert (await served.client.get("/v2/models/ensemble/versions/2/ready")).status == 404
        served.registry.add(ServedModel("fable", "/fable"))
        for path, status in (
            ("/v2/health/live", 200),
            ("/v2/health/ready", 400),
            ("/v2/models/fable/ready", 400),
            ("/v2/models/story/ready", 200),
        ):
            answer = await served.client.get(path)
            assert (answer.status, answer.body) == (status, b"")


@in_virtual_time
async def test_nothing_is_ready_where_there_is_nothing(hosts: Hosts) -> None:
    async with application() as served:
        assert (await served.client.get("/v2/health/ready")).status == 400
        assert (await served.client.post("/v2/repository/index", b"")).json == []


@in_virtual_time
async def test_pages_describe_a_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, max_rolling_batch_size=3) as served:
        assert (await served.client.get("/v2")).json["name"] == "djl-trtllm"
        assert (await served.client.get("/v2/models/ensemble")).json["name"] == "ensemble"
        config = (await served.client.get("/v2/models/story/versions/1/config")).json
        assert (config["name"], config["max_batch_size"]) == ("story", 3)
        assert (await served.client.get("/v2/models/stats")).json["model_stats"][0]["name"] == "story"
        assert (await served.client.get("/v2/models/ensemble/stats")).json["model_stats"][0]["name"] == "ensemble"
        assert (await served.client.get("/v2/models/preprocessing/config")).status == 400
        served.registry.add(ServedModel("fable", "/fable"))
        loading = await served.client.get("/v2/models/fable/config")
        assert (loading.status, loading.json["error"]) == (503, "model 'fable' is not ready")


@in_virtual_time
async def test_the_index_may_leave_out_what_is_not_ready(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        served.registry.add(ServedModel("fable", "/fable"))
        for body, names in (
            (b"", ["story", "fable"]),
            (b"{}", ["story", "fable"]),
            (b'{"ready": true}', ["story"]),
        ):
            index = (await served.client.post("/v2/repository/index", body)).json
            assert [model["name"] for model in index] == names
        for body in (b'{"ready": 1}', b'{"reddy": true}', b"[]", b"no", b"\x0c", b"\r", b" "):
            assert (await served.client.post("/v2/repository/index", body)).status == 400


@in_virtual_time
async def test_headers_that_the_encoder_knows_last_are_sent(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    body = (
        b'{"inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["the wolf"]}, '
        b'{"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [2]}], '
        b'"parameters": {"binary_data_output": true}}'
    )
    async with application(tokenizer) as served:
        answer = await served.client.post("/v2/models/ensemble/infer", body)
        length = int(answer.headers["inference-header-content-length"])
        assert 0 < length < len(answer.body) == int(answer.headers["content-length"])


def test_its_paths_are_described() -> None:
    check_descriptions(TRITON)
