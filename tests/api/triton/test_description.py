from __future__ import annotations

import orjson
import pytest

from djl_trtllm.api.base import ModelStatus
from djl_trtllm.api.triton import description
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError, NotReadyError, UnknownModelError
from djl_trtllm.request import FinishReason
from tests.api.scripts import check_golden
from tests.api.triton.played import PlayedModel


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


def test_several_models_have_their_own_names() -> None:
    models = [status(), status("fable", ready=False)]
    index = description.repository_index(models)
    assert [(model["name"], model["state"]) for model in index] == [("story", "READY"), ("fable", "UNAVAILABLE")]
    assert "GET /ping" in index[1]["reason"]
    assert [model["name"] for model in description.repository_index(models, ready_only=True)] == ["story"]


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


def test_the_server_names_its_extensions() -> None:
    metadata = description.server_metadata()
    assert metadata["name"] == "djl-trtllm"
    assert {"generate", "binary_tensor_data", "statistics"} <= set(metadata["extensions"])


def test_a_model_that_is_not_ready_has_no_context() -> None:
    assert description.require_context(status()).name == "story"
    with pytest.raises(NotReadyError, match="model 'story' is not ready"):
        description.require_context(status(ready=False))


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
