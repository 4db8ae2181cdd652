from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from djl_trtllm.api.base import ModelStatus
from djl_trtllm.api.dialects.triton import description
from djl_trtllm.api.dialects.triton.description import refuse_tensor_parameters
from djl_trtllm.api.dialects.triton.dialect import TRITON
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError, UnknownModelError, UnsupportedParameterError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.service.lifecycle import ServedModel
from tests.api.models import PlayedModel
from tests.api.scripts import check_golden
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time

BODY = b'{"text_input": "the wolf", "max_tokens": 2}'
PARTS = ("preprocessing", "postprocessing", "tensorrt_llm")


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


def status(name: str = "story", *, ready: bool = True) -> ModelStatus:
    return ModelStatus(name, ready, PlayedModel() if ready else None, Statistics())


def test_metadata_names_every_input_with_its_batch_dimension() -> None:
    metadata = description.model_metadata("ensemble")
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("ensemble", ["1"], "ensemble")
    assert len(metadata["inputs"]) == 34
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
    assert metadata["outputs"][2] == {"name": "output_log_probs", "datatype": "FP32", "shape": [-1, -1, -1]}
    assert len(description.model_metadata("tensorrt_llm_bls")["inputs"]) == 40


@pytest.mark.parametrize(("decoupled", "shown"), [(None, True), (True, True), (False, False)])
def test_the_configuration_says_whether_there_are_streams(decoupled: bool | None, shown: bool) -> None:
    model = PlayedModel(Options(decoupled=decoupled, max_rolling_batch_size=5))
    config = description.model_config("ensemble", model)
    assert (config["max_batch_size"], config["model_transaction_policy"]) == (5, {"decoupled": shown})
    expected = {"name": "max_tokens", "data_type": "TYPE_INT32", "dims": [1], "optional": False}
    assert config["input"][2] == expected
    assert config["output"][0] == {"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]}


@pytest.mark.parametrize("name", description.PARTS)
def test_a_part_takes_no_requests_and_says_where_to_send_them(name: str) -> None:
    for refused in (description.model_metadata, description.check_takes_requests):
        with pytest.raises(InvalidRequestError, match="send them to 'ensemble'"):
            refused(name)
    with pytest.raises(InvalidRequestError, match="send them to 'ensemble'"):
        description.model_config(name, PlayedModel())


def test_the_models_of_a_repository_are_shown_as_triton_prints_them(tmp_path: Path) -> None:
    assert TRITON.ready_text(tmp_path) == ""
    for name in ("ensemble", "preprocessing", "tensorrt_llm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f'name: "{name}"')
    shown = TRITON.ready_text(tmp_path).splitlines()
    assert [line[:16] for line in shown[3:-1]] == ["| ensemble      ", "| preprocessing ", "| tensorrt_llm  "]
    assert shown[1] == "| Model         | Version | Status |"
    assert shown[0] == shown[2] == shown[-1] == "+---------------+---------+--------+"


@pytest.mark.parametrize("version", [None, "", "1"])
def test_the_only_version_is_1(version: str | None) -> None:
    description.check_version(version, "ensemble")
    with pytest.raises(UnknownModelError, match="model 'ensemble' has no version '2'"):
        description.check_version("2", "ensemble")


def test_the_index_has_the_names_of_the_only_model() -> None:
    index = description.repository_index([status()])
    names = ["ensemble", "postprocessing", "preprocessing", "story", "tensorrt_llm", "tensorrt_llm_bls"]
    assert [model["name"] for model in index] == names
    assert index[0] == {"name": "ensemble", "version": "1", "state": "READY", "reason": ""}


def test_statistics_count_requests_and_nanoseconds() -> None:
    model = status()
    figures = model.statistics
    figures.last_request_at = 1_700_000_000.1234
    figures.finished.update({FinishReason.LENGTH: 2, FinishReason.END_TOKEN: 1, FinishReason.CANCELLED: 1})
    for histogram, seconds in (
        (figures.queue_time, 0.25),
        (figures.time_to_first_token, 1.0),
        (figures.request_time, 3.0),
    ):
        histogram.observe(seconds)
    (shown,) = description.statistics([model], "ensemble")["model_stats"]
    assert (shown["name"], shown["version"], shown["inference_count"]) == ("ensemble", "1", 3)
    assert shown["last_inference"] == 1_700_000_000_123
    stats = shown["inference_stats"]
    assert stats["success"] == {"count": 3, "ns": 3_000_000_000}
    assert stats["fail"] == {"count": 1, "ns": 0}
    assert stats["queue"] == {"count": 1, "ns": 250_000_000}
    assert stats["compute_input"] == {"count": 1, "ns": 750_000_000}
    assert stats["compute_infer"] == {"count": 1, "ns": 2_000_000_000}
    assert description.statistics([model])["model_stats"][0]["name"] == "story"


def test_descriptions_are_as_stored() -> None:
    model = status()
    model.statistics.finished.update({FinishReason.LENGTH: 2, FinishReason.ERROR: 1})
    shown = [
        description.server_metadata()["extensions"],
        description.model_metadata("tensorrt_llm_bls"),
        description.model_config("ensemble", PlayedModel()),
        description.statistics([model]),
        description.repository_index([model, status("fable", ready=False)]),
    ]
    check_golden("triton-descriptions", orjson.dumps(shown, option=orjson.OPT_INDENT_2))


FILLED = {"{name}": "hen", "{region}": "r", "{model}": "ensemble"}


@in_virtual_time
async def test_every_path_is_refused_in_tritons_shape(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        for method, paths in (("POST", description.REFUSED_ACTIONS), ("GET", description.REFUSED_PAGES)):
            for path, explanation in paths.items():
                for placeholder, value in FILLED.items():
                    path = path.replace(placeholder, value)
                answer = await served.client.begin(method, path, b"{}").end()
                assert (answer.status, answer.json) == (400, {"error": explanation}), path


def test_the_explanation_says_what_to_do_instead() -> None:
    said = {**description.REFUSED_ACTIONS, **description.REFUSED_PAGES, **description.REFUSED_METHODS}
    assert "POST /models" in said["/v2/repository/models/{name}/load"] == said["RepositoryModelUnload"]
    assert "send their values" in said["/v2/cudasharedmemory/region/{region}/register"]
    assert said["/v2/systemsharedmemory/status"] == said["SystemSharedMemoryStatus"]
    assert "GET /metrics" in said["/v2/logging"] == said["TraceSetting"]


def test_parameters_of_tensors_are_refused_by_name() -> None:
    refuse_tensor_parameters([], "input 'x'")
    refuse_tensor_parameters(["binary_data_size"], "input 'x'", "binary_data_size")
    with pytest.raises(UnsupportedParameterError, match=r"^parameter \"shared_memory_region\" of input 'x' is not"):
        refuse_tensor_parameters(["shared_memory_region"], "input 'x'", "binary_data_size")
    with pytest.raises(UnsupportedParameterError, match="not available: no output has classes"):
        refuse_tensor_parameters(["classification"], "output 'y'")
    with pytest.raises(InvalidRequestError, match=r"^unknown parameter \"colour\" of output 'y': expected none$"):
        refuse_tensor_parameters(["colour"], "output 'y'")
    with pytest.raises(InvalidRequestError, match=r"expected binary_data$"):
        refuse_tensor_parameters(["binary_data", "a"], "output 'y'", "binary_data")
