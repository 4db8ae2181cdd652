from __future__ import annotations

import gzip
import json
import struct
import zlib
from typing import Any

import orjson
import pytest

from djl_trtllm.api import Call, RawRequest
from djl_trtllm.api.triton.infer import parse_infer
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    UnsupportedParameterError,
)
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.scripts import EOS, FAILED, FAILURE, PROMPT, TEXT, answer, several
from tests.api.triton.played import PlayedModel

TEXT_INPUT: dict[str, Any] = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a wolf"]}
MAX_TOKENS: dict[str, Any] = {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [5]}


def tensor(name: str, datatype: str, data: Any, shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [1, len(data)], "data": data}


def read(*inputs: dict[str, Any], binary: bytes = b"", headers: dict[str, str] | None = None, **members: Any) -> Call:
    payload = orjson.dumps({"inputs": [TEXT_INPUT, MAX_TOKENS, *inputs]} | members)
    properties = dict(headers or {})
    if binary:
        properties.setdefault("inference-header-content-length", str(len(payload)))
    return parse_bytes(payload + binary, properties)


def parse_bytes(body: bytes, properties: dict[str, str]) -> Call:
    return parse_infer(RawRequest(body, properties, "/v2/models/{model}/infer"), PlayedModel(), "ensemble")


def test_the_response_has_the_outputs_as_tensors() -> None:
    call = read(tensor("return_log_probs", "BOOL", [True]), id="7")
    assert call.requests[0].prompt == "a wolf"
    assert json.loads(answer(call.encoder, EOS)) == {
        "id": "7",
        "model_name": "ensemble",
        "model_version": "1",
        "parameters": {"sequence_end": False, "sequence_id": 0, "sequence_start": False},
        "outputs": [
            tensor("text_output", "BYTES", [TEXT], [1]),
            tensor("cum_log_probs", "FP32", [-1.8464]),
            tensor("output_log_probs", "FP32", [-0.0524, -1.2865, -0.0075, 0.0, -0.5], [1, 1, 5]),
        ],
    }
    assert (call.encoder.content_type, call.late_headers()) == ("application/json", ())


def test_outputs_that_are_named_come_alone_and_as_bytes() -> None:
    outputs: list[dict[str, Any]] = [
        {"name": "output_log_probs", "parameters": {"binary_data": True}},
        {"name": "text_output", "parameters": {"binary_data": True}},
        {"name": "batch_index"},
        {"name": "sequence_index", "parameters": {"binary_data": False}},
    ]
    call = read(outputs=outputs)
    body = answer(call.encoder, EOS)
    ((name, length),) = call.late_headers()
    assert (name, call.encoder.content_type) == ("Inference-Header-Content-Length", "application/octet-stream")
    shown = json.loads(body[: int(length)])["outputs"]
    text = TEXT.encode()
    assert [each["name"] for each in shown] == [each["name"] for each in outputs]
    assert [each.get("parameters") for each in shown[:2]] == [
        {"binary_data_size": 20},
        {"binary_data_size": 4 + len(text)},
    ]
    assert [each["data"] for each in shown[2:]] == [[0], [0]]
    assert body[int(length) :] == bytes(20) + struct.pack("<I", len(text)) + text


def test_all_outputs_are_bytes_if_the_request_says_so() -> None:
    call = read(parameters={"binary_data_output": True})
    body = answer(call.encoder, EOS)
    length = int(dict(call.late_headers())["Inference-Header-Content-Length"])
    assert all("binary_data_size" in each["parameters"] for each in json.loads(body[:length])["outputs"])


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_the_response_is_compressed_if_the_client_accepts_it(encoding: str, unpack: Any) -> None:
    call = read(headers={"accept-encoding": encoding})
    assert unpack(answer(call.encoder, EOS)) == answer(read().encoder, EOS)
    assert call.late_headers() == (("Content-Encoding", encoding),)


def test_bytes_follow_the_json_in_the_order_of_the_inputs() -> None:
    raw = struct.pack("<f", 0.9) + b"\x03\0\0\0red\x03\0\0\0fox"
    call = read(
        {"name": "temperature", "datatype": "FP32", "shape": [1, 1], "parameters": {"binary_data_size": 4}},
        {"name": "stop_words", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": 14}},
        binary=raw,
    )
    (request,) = call.requests
    assert (request.sampling.temperature, request.stop) == (0.9, ("red", "fox"))


def test_each_row_of_a_batch_is_a_prompt_with_its_own_values() -> None:
    call = parse_bytes(
        orjson.dumps(
            {
                "inputs": [
                    tensor("text_input", "BYTES", ["a wolf", "a fox"], [2, 1]),
                    tensor("max_tokens", "UINT32", [3, 4], [2, 1]),
                    tensor("stop_words", "BYTES", ["x", "", "y", "z"], [2, 2]),
                    tensor("exclude_input_in_output", "BOOL", [False, True], [2, 1]),
                ]
            }
        ),
        {},
    )
    assert [(each.prompt, each.sampling.max_new_tokens, each.stop) for each in call.requests] == [
        ("a wolf", 3, ("x",)),
        ("a fox", 4, ("y", "z")),
    ]
    encoder = call.encoder
    encoder.begin(PROMPT)
    encoder.begin(PROMPT)
    ended = SequenceResult(FinishReason.LENGTH, 1, None, None)
    assert encoder.encode(OutputChunk(0, [Token(1, "b", None, False)], ended, 1)) == b""
    two = [Token(1, "a", None, False), Token(2, "a", None, False)]
    shown = json.loads(encoder.encode(OutputChunk(0, two, ended, 0)))["outputs"]
    assert shown[0] == tensor("text_output", "BYTES", [PROMPT.text + "aa", "b"], [2])
    assert (shown[1]["shape"], shown[2]["shape"]) == ([2, 1], [2, 1, 2])


def test_several_sequences_have_a_text_each() -> None:
    call = read(
        tensor("num_return_sequences", "INT32", [2]), outputs=[{"name": "text_output"}, {"name": "sequence_index"}]
    )
    shown = json.loads(answer(call.encoder, several(2)))["outputs"]
    assert shown == [
        tensor("text_output", "BYTES", ["00 01", "10 11"], [2]),
        tensor("sequence_index", "INT32", [0, 1]),
    ]


def test_an_error_has_a_status() -> None:
    encoder = read().encoder
    assert answer(encoder, FAILED) == encoder.error(FAILURE) == b""


@pytest.mark.parametrize(
    ("inputs", "members", "message"),
    [
        ([tensor("stream", "BOOL", [True])], {}, "use generate_stream"),
        ([{"name": "stream", "datatype": "BOOL", "shape": [1, 1]}], {}, "neither 'data' nor"),
        ([tensor("hen", "INT32", [1])], {}, "unexpected inference input \"hen\" for model 'ensemble'"),
        ([{"data": []}], {}, "unexpected inference input null"),
        ([{"name": ["a"], "data": []}], {}, "unexpected inference input"),
        ([TEXT_INPUT], {}, "input 'text_input' is given twice"),
        (
            [tensor("top_k", "INT32", [1], [1])],
            {},
            r"unexpected shape for input 'top_k' .* Expected \[-1,1\], got \[1\]",
        ),
        ([tensor("top_k", "INT32", [1, 2])], {}, "unexpected shape"),
        ([tensor("top_k", "INT32", [1, 2], [2, 1])], {}, "input batch sizes differ: 1 in 'max_tokens', 2 in 'top_k'"),
        ([tensor("top_k", "INT32", [1.5])], {}, "'top_k' is 1.5"),
        ([tensor("top_p", "FP32", [7])], {}, "'top_p' is 7.0"),
        ([tensor("top_k", "FP64", [[1, 2]])], {}, "has 2 elements: expected 1"),
        ([], {"inputs": 3}, "'inputs' is 3"),
        ([], {"inputs": [3]}, r"'inputs' is \[3\]"),
        ([], {"inputs": [{}] * 65}, "expected a list of up to 64 objects"),
        ([], {"inputs": []}, "'text_input' is required"),
        ([], {"inputs": [tensor("text_input", "BYTES", [], [0, 1])]}, "the batch size is 0: expected 1 to 64"),
        ([], {"inputs": [tensor("text_input", "BYTES", ["a"] * 65, [65, 1])]}, "the batch size is 65"),
        ([], {"outputs": [{"name": "hen"}]}, 'unexpected inference output "hen"'),
        ([], {"outputs": [{}]}, "unexpected inference output null"),
        ([], {"outputs": "a"}, "'outputs' is"),
        ([], {"outputs": [{"name": "text_output", "parameters": {"binary_data": 1}}]}, "'binary_data' is 1"),
        ([], {"outputs": [{"name": "text_output", "parameters": {"classification": 1}}]}, "classification"),
        ([], {"parameters": []}, "'parameters' is"),
        ([], {"parameters": {"hen": 1}}, 'unknown input "hen"'),
        ([], {"parameters": {"priority": 3}}, "'priority' is 3"),
        ([], {"id": 3}, "'id' is 3"),
        ([], {"hen": 3}, 'unknown member "hen"'),
    ],
)
def test_what_is_wrong_is_named(inputs: list[dict[str, Any]], members: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(*inputs, **members)


def test_rows_of_a_batch_are_named_and_bounded() -> None:
    def batch(**columns: list[int]) -> Call:
        texts = tensor("text_input", "BYTES", ["a"] * 64, [64, 1])
        given = [tensor(name, "INT32", values, [64, 1]) for name, values in columns.items()]
        return parse_bytes(orjson.dumps({"inputs": [texts, *given]}), {})

    assert len(batch(max_tokens=[3] * 64, num_return_sequences=[2] * 64).requests) == 64
    with pytest.raises(InvalidRequestError, match="prompt 63: 'max_tokens' is 0"):
        batch(max_tokens=[*[3] * 63, 0])
    with pytest.raises(InvalidRequestError, match="192 sequences for 64 prompts: expected at most 128"):
        batch(max_tokens=[3] * 64, num_return_sequences=[3] * 64)
    with pytest.raises(InvalidRequestError, match="the prompts differ in 'num_return_sequences'"):
        batch(max_tokens=[3] * 64, num_return_sequences=[*[1] * 63, 2])


@pytest.mark.parametrize("name", ["context_logits", "arrival_time_ns"])
def test_outputs_that_are_not_produced_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=f"output '{name}' is not available: expected 'text_output'"):
        read(outputs=[{"name": name}])


def test_large_inputs_that_are_refused_are_not_unpacked() -> None:
    weights = {"name": "lora_weights", "datatype": "FP16", "shape": [1, 100, 4096]}
    with pytest.raises(UnsupportedParameterError, match=r"'lora_weights' is .*register the adapter"):
        read(weights | {"data": [0.5] * 1000})
    with pytest.raises(UnsupportedParameterError, match=r"'lora_weights' is .*register the adapter"):
        read(weights | {"parameters": {"binary_data_size": 1000}}, binary=bytes(1000))


@pytest.mark.parametrize("size", [5, -1, True, 2**63, "4", None, 1.0])
def test_sizes_that_do_not_fit_are_refused(size: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"'top_k'|\"top_k\""):
        read(
            {"name": "top_k", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": size}},
            binary=bytes(4),
        )


def test_bytes_that_belong_to_nothing_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="4 bytes follow the tensors: expected none"):
        read(binary=bytes(4))
    with pytest.raises(InvalidRequestError, match="and no 'data'"):
        read(tensor("top_k", "INT32", [1]) | {"parameters": {"binary_data_size": 4}}, binary=bytes(4))


@pytest.mark.parametrize("length", ["-1", "1e3", "", "99999", "9" * 5000, "\u0663", "0"])
def test_the_length_of_the_json_is_a_number_within_the_body(length: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"Inference-Header-Content-Length is|the body's JSON is not"):
        read(headers={"inference-header-content-length": length})


def test_a_body_is_unpacked_no_further_than_the_limit() -> None:
    model = PlayedModel(Options(max_request_size=1000))
    request = RawRequest(gzip.compress(bytes(100_000)), {"content-encoding": "gzip"})
    with pytest.raises(RequestTooLargeError):
        parse_infer(request, model, "ensemble")


def test_words_in_bytes_that_are_not_unicode_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        read(
            {"name": "stop_words", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 5}},
            binary=b"\x01\0\0\0\xff",
        )
