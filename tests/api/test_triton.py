from __future__ import annotations

import gzip
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from msgspec.structs import replace

from djl_trtllm.api.base import Call, ModelStatus, Prompt, RawRequest
from djl_trtllm.api.dialects.triton import description
from djl_trtllm.api.dialects.triton.description import refuse_tensor_parameters
from djl_trtllm.api.dialects.triton.dialect import (
    TRITON,
    accepted_encoding,
    compress,
    parse_infer,
    read_body,
    read_id,
    read_object,
    read_parameters,
)
from djl_trtllm.api.dialects.triton.inference import (
    ALWAYS,
    ENSEMBLE,
    OUTPUTS,
    BatchEncoder,
    InferenceRequest,
    SequenceOutput,
    output_tensors,
)
from djl_trtllm.api.dialects.triton.tensors import MOST_ELEMENTS, Tensor, from_bytes, from_json, to_bytes
from djl_trtllm.api.parameters import Problems
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import TritonModel
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    RequestTooLargeError,
    UnknownModelError,
    UnsupportedParameterError,
)
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, Sampling, SequenceResult, Token
from djl_trtllm.service.lifecycle import ServedModel
from tests.api.models import EOS, FAILED, FAILURE, PlayedModel, answer, check_golden
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.tables import by_rows, by_table
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


@pytest.mark.parametrize(("decoupled", "shown"), [(None, True), (True, True), (False, False)])
def test_the_configuration_says_whether_there_are_streams(decoupled: bool | None, shown: bool) -> None:
    model = PlayedModel(Options(decoupled=decoupled, max_rolling_batch_size=5))
    config = description.model_config("ensemble", model)
    assert (config["max_batch_size"], config["model_transaction_policy"]) == (5, {"decoupled": shown})


@by_rows("name", description.PARTS)
def test_a_part_takes_no_requests_and_says_where_to_send_them(name: str) -> None:
    for refused in (description.model_metadata, description.check_takes_requests):
        with pytest.raises(InvalidRequestError, match="send them to 'ensemble'"):
            refused(name, PlayedModel())
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
        description.model_metadata("tensorrt_llm_bls", PlayedModel()),
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


TOKENS = [Token(1, "a", -0.5, False), Token(2, "b", None, False)]


class Encoder(BatchEncoder):
    def _body(self) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("wanted", "cumulative", "rows", "total"),
    [(False, -1.0, [0.0, 0.0], 0.0), (True, -1.0, [-0.5, 0.0], -1.0), (True, None, [-0.5, 0.0], 0.0)],
)
def test_log_probabilities_are_0_unless_they_are_wanted(
    wanted: bool, cumulative: float | None, rows: list[float], total: float
) -> None:
    encoder = Encoder([InferenceRequest(GenerationRequest(sampling=Sampling()), 1, wanted, False, None)], ALWAYS)
    encoder.begin(Prompt("a prompt", 2))
    encoder.encode(OutputChunk(0, TOKENS, SequenceResult(FinishReason.LENGTH, 2, cumulative, None)))
    shown = [(name, tensor.data) for name, tensor in encoder.tensors().items()]
    assert shown == [("text_output", ["ab"]), ("cum_log_probs", [total]), ("output_log_probs", rows)]


def test_a_text_for_each_sequence_and_rows_of_equal_length() -> None:
    sequences = [SequenceOutput("a", [-1.0], -1.0), SequenceOutput("bc", [-2.0, -3.0], -5.0)]
    log_probabilities = [-1.0, 0.0, -2.0, -3.0]
    assert output_tensors(sequences, [0], [0, 1]) == {
        "text_output": Tensor("text_output", "BYTES", (2,), ["a", "bc"]),
        "cum_log_probs": Tensor("cum_log_probs", "FP32", (1, 2), [-1.0, -5.0]),
        "output_log_probs": Tensor("output_log_probs", "FP32", (1, 2, 2), log_probabilities),
        "batch_index": Tensor("batch_index", "INT32", (1, 1), [0]),
        "sequence_index": Tensor("sequence_index", "INT32", (1, 2), [0, 1]),
    }
    two = output_tensors(sequences, [0, 3], [1])
    assert [tensor.shape for tensor in two.values()] == [(2,), (2, 1), (2, 1, 2), (2, 1), (2, 1)]
    assert (two["batch_index"].data, two["sequence_index"].data) == ([0, 3], [1, 1])


def test_todays_names_of_inputs_mean_the_same_as_their_older_ones() -> None:
    def values(given: dict[str, Any]) -> tuple[Any, list[str]]:
        problems = Problems()
        request = ENSEMBLE.read_request(
            {"text_input": "a", "max_tokens": 2, "temperature": 1.0, **given}, PlayedModel(), problems
        )
        return request.generation.sampling, problems.invalid

    assert values({"seed": [7], "min_tokens": [1]}) == values({"random_seed": 7, "min_length": 1})
    assert values({"seed": [7]})[0].seed == 7
    assert "'seed' and 'random_seed'" in values({"random_seed": 6, "seed": 7})[1][0]


def test_inputs_are_known_and_those_that_are_refused_are_small() -> None:
    check_input = ENSEMBLE.check_input
    check_input("text_input", "ensemble", 10**9)
    check_input("lora_weights", "ensemble", 256)
    with pytest.raises(UnsupportedParameterError, match=r"'lora_weights' is .*register the adapter"):
        check_input("lora_weights", "ensemble", 257)
    with pytest.raises(InvalidRequestError, match="unexpected inference input \"hen\" for model 'ensemble'"):
        check_input("hen", "ensemble", 1)
    for name in ("temprature", "max_token", "x" * 100_000):
        with pytest.raises(InvalidRequestError, match="unexpected inference input") as refused:
            check_input(name, "ensemble", 1)
        known = {"temprature": "temperature", "max_token": "max_tokens"}.get(name)
        assert ("did you mean" in str(refused.value)) is (known is not None)
        assert known is None or f"'{known}'" in str(refused.value)


def test_outputs_are_those_that_are_named_or_the_usual_ones() -> None:
    check_outputs = partial(ENSEMBLE.check_outputs, model="ensemble", usual=ALWAYS)
    assert check_outputs([]) == ALWAYS
    assert check_outputs(["batch_index", "text_output", "text_output"]) == ("batch_index", "text_output")
    named = ", ".join(f"'{output.name}'" for output in OUTPUTS)
    with pytest.raises(UnsupportedParameterError, match=f"'context_logits' is not available: expected {named}$"):
        check_outputs(["context_logits"])
    for name in ("hen", None, ["text_output"]):
        with pytest.raises(InvalidRequestError, match="unexpected inference output"):
            check_outputs([name])


NUMBERS = {
    f"{kind}{size}": f"{name}{size // 8}" for kind, name in (("INT", "i"), ("UINT", "u")) for size in (8, 16, 32, 64)
}
NUMBERS |= {"FP16": "f2", "FP32": "f4", "FP64": "f8", "BOOL": "?"}
"""Triton's types by numpy's names."""


@by_rows("datatype", NUMBERS)
def test_every_datatype_is_read_and_written_as_numpy_does(datatype: str) -> None:
    array: Any = np.array([[1, 0, 1], [1, 1, 0]], NUMBERS[datatype])
    tensor = from_bytes("x", datatype, [2, 3], array.tobytes())
    assert tensor == Tensor("x", datatype, (2, 3), array.ravel().tolist())
    assert to_bytes(tensor) == array.tobytes()


def test_bf16_is_the_upper_half_of_a_float() -> None:
    raw = struct.pack("<f", 0.5)[2:] + struct.pack("<f", -3.0)[2:]
    assert from_bytes("x", "BF16", [2], raw).data == [0.5, -3.0]


def test_strings_follow_their_lengths() -> None:
    raw = b"\x03\0\0\0abc\0\0\0\0\x02\0\0\0" + "é".encode()
    tensor = from_bytes("x", "BYTES", [1, 3], raw)
    assert tensor.data == ["abc", "", "é"]
    assert to_bytes(tensor) == raw


@by_table("datatype", "shape", "raw", "message")
def test_bytes_that_are_no_such_tensor_are_refused(datatype: Any, shape: Any, raw: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"input 'x'.*") as caught:
        from_bytes("x", datatype, shape, raw)
    assert message in str(caught.value)


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]]])
def test_json_is_flat_or_nested(data: Any) -> None:
    assert from_json("x", "INT32", [2, 2], data) == Tensor("x", "INT32", (2, 2), [1, 2, 3, 4])


def test_json_of_one_element_needs_no_list() -> None:
    assert from_json("x", "BYTES", [1, 1], "a").data == ["a"]


@by_rows(
    ("datatype", "data", "message"),
    [
        ("INT32", [1, 2], "has 2 elements: expected 1"),
        ("INT32", ["1"], 'has "1": expected elements of INT32'),
        ("INT32", [True], "has true"),
        ("INT32", None, "has null"),
        ("BOOL", [1], "expected elements of BOOL"),
        ("BYTES", [1], "expected elements of BYTES"),
        ("BYTES", [[[[[[[[[[["a"]]]]]]]]]]], "expected elements of BYTES"),
        ("FP32", [{}], "has {}"),
        ("INT32", [1] * (MOST_ELEMENTS + 1), f"has {MOST_ELEMENTS + 1} elements: expected 1"),
        ("INT32", [[1] * (MOST_ELEMENTS + 1)], "has too many elements: expected 1"),
    ],
)
def test_json_that_is_no_such_tensor_is_refused(datatype: str, data: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match="input 'x'") as caught:
        from_json("x", datatype, [1], data)
    assert message in str(caught.value)


def test_a_tensor_has_at_most_8192_elements_however_they_are_nested() -> None:
    for data in ([1] * 8192, [[1] * 8192], [[1] * 4096] * 2):
        assert len(from_json("x", "INT32", [8192], data).data) == 8192
    with pytest.raises(InvalidRequestError, match=r"has 8193 elements, of the shape .*: expected at most 8192"):
        from_json("x", "INT32", [8193], [1] * 8193)


def test_no_more_strings_are_read_than_the_shape_says() -> None:
    with pytest.raises(InvalidRequestError, match="has 1 elements in 5 of its 10 bytes: expected 1 elements"):
        from_bytes("x", "BYTES", [1], b"\x01\0\0\0a" * 2)


PLAIN = b'{"a": 1}' * 10


def request(body: bytes, encoding: str) -> RawRequest:
    return RawRequest(body, {"content-encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("", PLAIN),
        ("identity", PLAIN),
        ("gzip", gzip.compress(PLAIN, mtime=0)),
        ("GZIP ", gzip.compress(PLAIN, mtime=0)),
        ("deflate", zlib.compress(PLAIN)),
    ],
)
def test_compressed_bodies_are_unpacked(encoding: str, body: bytes) -> None:
    assert read_body(request(body, encoding), len(PLAIN)) == PLAIN


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("gzip", b"no", "not valid gzip"),
        ("deflate", zlib.compress(PLAIN)[:-1], "it has no end"),
        ("gzip", gzip.compress(PLAIN, mtime=0) + b"x", "or more after it"),
        ("br", PLAIN, "the content-encoding is \"br\": expected 'gzip', 'deflate'"),
    ],
)
def test_a_body_that_cannot_be_unpacked_is_refused(encoding: str, body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_body(request(body, encoding), 1000)


@by_rows("data", [b"", b"[1]", b"nonsense", b"\xff", b'"a"', b"[" * 100_000, b'{"a":' * 5000])
def test_json_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"^the body "):
        read_object(data)


def test_parameters_and_id_have_their_types() -> None:
    assert read_object(b'{"id": "7"}') == {"id": "7"}
    assert (read_parameters({}), read_parameters({"parameters": {"a": 1}})) == ({}, {"a": 1})
    assert (read_id({}), read_id({"id": "7"})) == ("", "7")
    with pytest.raises(InvalidRequestError, match=r"'parameters' is \[\]: expected an object"):
        read_parameters({"parameters": []})
    with pytest.raises(InvalidRequestError, match="'id' is 7: expected a string"):
        read_id({"id": 7})


@pytest.mark.parametrize(
    ("header", "encoding"),
    [("", ""), ("gzip;q=0.5, br", "gzip"), ("deflate", "deflate"), ("Deflate, GZIP", "gzip"), ("br", "")],
)
def test_the_response_is_compressed_as_the_client_wants(header: str, encoding: str) -> None:
    assert accepted_encoding(RawRequest(b"", {"accept-encoding": header})) == encoding


def test_a_response_is_compressed_fast_and_always_the_same() -> None:
    body = bytes(number * number % 251 for number in range(20_000))
    assert compress(body, "gzip") == gzip.compress(body, 1, mtime=0) != gzip.compress(body, 2, mtime=0)
    assert compress(body, "deflate") == zlib.compress(body, 1)


INPUTS: list[dict[str, Any]] = [
    {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a wolf"]},
    {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [5]},
]


def infer(body: bytes | None = None, limit: int = 10_000, **headers: str) -> Call:
    properties = {name.replace("_", "-"): value for name, value in headers.items()}
    data = orjson.dumps({"inputs": INPUTS}) if body is None else body
    request = RawRequest(data, properties, "/v2/models/{model}/infer")
    return parse_infer(request, PlayedModel(Options(max_request_size=limit)), "ensemble")


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_the_response_is_compressed_if_the_client_accepts_it(encoding: str, unpack: Any) -> None:
    call = infer(accept_encoding=encoding)
    assert unpack(answer(call.encoder, EOS)) == answer(infer().encoder, EOS)
    assert call.late_headers() == (("Content-Encoding", encoding),)


def test_an_error_has_a_status() -> None:
    encoder = infer().encoder
    assert answer(encoder, FAILED) == encoder.error(FAILURE) == b""


def test_a_body_is_unpacked_no_further_than_the_limit() -> None:
    with pytest.raises(RequestTooLargeError):
        infer(gzip.compress(bytes(100_000)), 1000, content_encoding="gzip")


def column(name: str, values: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": "UINT64", "shape": [len(values), 1], "data": values}


def batch(**columns: list[int]) -> Call:
    texts = {"name": "text_input", "datatype": "BYTES", "shape": [64, 1], "data": ["a"] * 64}
    given = [texts, *(column(name, values) for name, values in columns.items())]
    return infer(orjson.dumps({"inputs": given}))


def test_rows_of_a_batch_are_named_and_bounded() -> None:
    seeds = [2**63 + number for number in range(64)]
    calls = batch(max_tokens=[3] * 64, num_return_sequences=[2] * 64, random_seed=seeds)
    assert [each.sampling.seed for each in calls.requests] == seeds
    for columns, told in (
        ({"max_tokens": [*[3] * 63, 0]}, "prompt 63: 'max_tokens' is 0"),
        ({"max_tokens": [3] * 64, "num_return_sequences": [3] * 64}, "192 sequences for 64 prompts: .* at most 128"),
        ({"max_tokens": [3] * 64, "num_return_sequences": [*[1] * 63, 2]}, "differ in 'num_return_sequences'"),
    ):
        with pytest.raises(InvalidRequestError, match=told):
            batch(**columns)


LLMAPI = PlayedModel(Options(triton_model=TritonModel.LLMAPI))
FORTY = [
    OutputChunk(0, [Token(5, "forty", -0.5, False)], None),
    OutputChunk(
        0, [Token(6, " two", -0.25, False)], SequenceResult(FinishReason.STOP, 2, -0.75, None, stop_sequence="#")
    ),
]


def of_llm_api(body: dict[str, Any], verb: str = "generate", **options: Any) -> list[Any]:
    """The responses of the LLM API's model to a body."""
    model = PlayedModel(Options(triton_model=TritonModel.LLMAPI, **options))
    path = f"/v2/models/{{model}}/{verb}"
    call = TRITON.parse(RawRequest(orjson.dumps(body), {}, path, {"model": "tensorrt_llm"}), model)
    call.encoder.begin(Prompt("The answer is", 3))
    told = b"".join(call.encoder.encode(chunk) for chunk in FORTY).decode()
    return [orjson.loads(each.removeprefix("data: ")) for each in told.split("\n\n") if each]


def test_the_model_of_the_llm_api_is_described_and_takes_requests_where_the_ensembles_part_does_not() -> None:
    description.check_takes_requests("tensorrt_llm", LLMAPI)
    shown = [make("tensorrt_llm", LLMAPI) for make in (description.model_metadata, description.model_config)]
    check_golden("triton-llm-api-descriptions", orjson.dumps(shown, option=orjson.OPT_INDENT_2))


def test_a_whole_answer_of_the_llm_api_has_what_is_asked_for() -> None:
    body = {"text_input": "The answer is", "sampling_param_max_tokens": 10}
    head = {"model_name": "tensorrt_llm", "model_version": "1", "text_output": "forty two"}
    (whole,) = of_llm_api(body)
    assert head.items() <= whole.items() and not {"finish_reason", "cum_log_probs"} & whole.keys()
    returned = dict.fromkeys(("return_finish_reason", "return_stop_reason", "return_cumulative_logprob"), True)
    (whole,) = of_llm_api(body | returned)
    reasons = {"finish_reason": "stop", "stop_reason": "#", "cumulative_logprob": -0.75}
    assert (head | reasons).items() <= whole.items()
    (event,) = of_llm_api(body, "generate_stream")  # no stream unless the input asks for one
    assert head.items() <= event.items()


def test_each_event_of_the_llm_api_has_the_text_so_far() -> None:
    body = {"text_input": ["The answer is"], "streaming": True, "return_finish_reason": True}
    events = of_llm_api(body, "generate_stream")
    assert [event["text_output"] for event in events] == ["forty", "forty two"]
    assert [event["finish_reason"] for event in events] == ["None", "stop"]
    with pytest.raises(InvalidRequestError, match="decoupled mode"):
        of_llm_api(body, "generate_stream", decoupled=False)


def test_a_stream_of_the_llm_api_that_fails_has_the_last_tokens_and_the_error() -> None:
    body = orjson.dumps({"text_input": "a", "streaming": True})
    path, names = "/v2/models/{model}/generate_stream", {"model": "tensorrt_llm"}
    call = TRITON.parse(RawRequest(body, {}, path, names), LLMAPI)
    call.encoder.begin(Prompt("a", 1))
    failed = SequenceResult(FinishReason.ERROR, 1, None, None, error=GenerationError("it failed"))
    text, error = call.encoder.encode(replace(FORTY[0], finished=failed)).split(b"\n\n", 1)
    assert b'"text_output":"forty"' in text and error == b'data: {"error":"it failed"}\n\n'
    assert call.encoder.encode(OutputChunk(0, [], failed)) == error


def test_tensors_of_the_llm_api_have_no_batch_dimension() -> None:
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["The answer is"]},
        {"name": "sampling_param_stop", "shape": [2], "datatype": "BYTES", "data": ["#", "!"]},
    ]
    (whole,) = of_llm_api({"inputs": inputs}, "infer")
    (output,) = whole["outputs"]
    assert (output["name"], output["shape"], output["data"]) == ("text_output", [1], ["forty two"])
    with pytest.raises(InvalidRequestError, match=r"unexpected shape .*'text_input'.* \[-1\], got \[1,1\]"):
        of_llm_api({"inputs": [inputs[0] | {"shape": [1, 1]}]}, "infer")
