from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api.base import Call, Prompt
from djl_trtllm.api.triton.protocol import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from djl_trtllm.api.triton.rpc import failure, parse_rpc
from djl_trtllm.api.triton.tensors import Tensor, to_bytes
from djl_trtllm.config import Options
from djl_trtllm.errors import GenerationError, InvalidRequestError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.triton.played import PlayedModel

PROMPT = Tensor("text_input", "BYTES", (1, 1), ["once"])
COUNT = Tensor("max_tokens", "UINT32", (1, 1), [4])
STREAM = Tensor("stream", "BOOL", (1, 1), [True])


def request(*tensors: Tensor, **parameters: bool) -> Any:
    """A request with tensors as bytes."""
    made = ModelInferRequest(model_name="ensemble", id="7")
    for tensor in tensors:
        made.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        made.raw_input_contents.append(to_bytes(tensor))
    for name, value in parameters.items():
        made.parameters[name].bool_param = value
    return made


def parse(made: Any, *, streams: bool = False, **options: Any) -> Call:
    return parse_rpc(made, PlayedModel(Options(**options)), streams=streams)


def chunk(text: str, index: int = 0, *, ends: bool = False, error: Any = None, generation: int = 0) -> OutputChunk:
    tokens = [Token(5, text, -0.5, False)] if text else []
    reason = FinishReason.ERROR if error else FinishReason.LENGTH
    finished = SequenceResult(reason, 1, -0.5, None, error=error) if ends or error else None
    return OutputChunk(index, tokens, finished, generation)


def outputs(response: Any) -> dict[str, tuple[list[int], bytes]]:
    return {
        output.name: (list(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def read_stream(data: bytes) -> Any:
    return ModelStreamInferResponse.FromString(data)


def test_a_whole_response() -> None:
    call = parse(request(PROMPT, COUNT))
    (generation,) = call.requests
    assert (generation.prompt, generation.sampling.max_new_tokens) == ("once", 4)
    call.encoder.begin(Prompt("once", 1))
    assert call.encoder.encode(chunk("upon")) == b""
    response = ModelInferResponse.FromString(call.encoder.encode(chunk(" a", ends=True)))
    assert (response.model_name, response.model_version, response.id) == ("ensemble", "1", "7")
    assert set(response.parameters) == {"sequence_id", "sequence_start", "sequence_end"}
    assert list(outputs(response)) == ["text_output", "cum_log_probs", "output_log_probs"]
    assert outputs(response)["text_output"] == ([1], b"\x06\x00\x00\x00upon a")
    assert outputs(response)["output_log_probs"] == ([1, 1, 2], bytes(8))


def test_the_prompt_is_in_a_whole_text_if_it_is_asked_for() -> None:
    call = parse(request(PROMPT, COUNT, Tensor("exclude_input_in_output", "BOOL", (1, 1), [False])))
    call.encoder.begin(Prompt("once", 1))
    response = ModelInferResponse.FromString(call.encoder.encode(chunk(" upon", ends=True)))
    assert outputs(response)["text_output"][1][4:] == b"once upon"


def test_only_the_outputs_that_are_named() -> None:
    made = request(PROMPT, COUNT)
    made.outputs.add(name="sequence_index")
    call = parse(made)
    call.encoder.begin(Prompt("once", 1))
    response = ModelInferResponse.FromString(call.encoder.encode(chunk("upon", ends=True)))
    assert outputs(response) == {"sequence_index": ([1, 1], bytes(4))}


def test_a_response_for_each_chunk_and_an_empty_one_at_the_end() -> None:
    call = parse(request(PROMPT, COUNT, STREAM, triton_enable_empty_final_response=True), streams=True)
    encoder: Any = call.encoder
    encoder.begin(Prompt("once", 1))
    first = read_stream(encoder.encode(chunk("upon"))).infer_response
    assert outputs(first)["text_output"] == ([1], b"\x04\x00\x00\x00upon")
    assert not first.parameters["triton_final_response"].bool_param
    assert encoder.encode(chunk("", ends=True)) == b""
    last = read_stream(encoder.end()).infer_response
    assert (last.id, len(last.outputs), last.parameters["triton_final_response"].bool_param) == ("7", 0, True)


def test_the_end_alone_is_a_response_if_there_was_none() -> None:
    call = parse(request(PROMPT, COUNT, STREAM), streams=True)
    encoder: Any = call.encoder
    response = read_stream(encoder.encode(chunk("", ends=True))).infer_response
    assert outputs(response)["text_output"] == ([1], bytes(4))
    assert encoder.end() == b""


def test_log_probabilities_of_a_stream_add_up() -> None:
    logprobs = Tensor("return_log_probs", "BOOL", (1, 1), [True])
    encoder = parse(request(PROMPT, COUNT, STREAM, logprobs), streams=True).encoder
    encoder.encode(chunk("a"))
    shown = outputs(read_stream(encoder.encode(chunk("b"))).infer_response)
    assert shown["cum_log_probs"] == ([1, 1], to_bytes(Tensor("", "FP32", (1,), [-1.0])))
    assert shown["output_log_probs"] == ([1, 1, 1], to_bytes(Tensor("", "FP32", (1,), [-0.5])))


def test_responses_of_several_prompts_and_sequences_have_their_indices() -> None:
    made = request(
        Tensor("text_input", "BYTES", (2, 1), ["a", "b"]),
        Tensor("max_tokens", "INT32", (2, 1), [4, 4]),
        Tensor("num_return_sequences", "INT32", (2, 1), [2, 2]),
        Tensor("temperature", "FP32", (2, 1), [1.0, 1.0]),
        Tensor("stream", "BOOL", (2, 1), [True, True]),
    )
    encoder = parse(made, streams=True).encoder
    shown = outputs(read_stream(encoder.encode(chunk("x", 1, generation=1))).infer_response)
    assert shown["batch_index"] == ([1, 1], b"\x01\x00\x00\x00") == shown["sequence_index"]


def test_a_model_that_is_not_decoupled_has_one_response_which_is_final() -> None:
    call = parse(request(PROMPT, COUNT, triton_enable_empty_final_response=True), streams=True, decoupled=False)
    encoder: Any = call.encoder
    encoder.begin(Prompt("once", 1))
    response = read_stream(encoder.encode(chunk("upon", ends=True))).infer_response
    assert response.parameters["triton_final_response"].bool_param
    assert encoder.end() == b""
    with pytest.raises(InvalidRequestError, match="decoupled mode"):
        parse(request(PROMPT, COUNT, STREAM), streams=True, decoupled=False)


@pytest.mark.parametrize("more", [(), (STREAM,)])
def test_an_error_has_the_name_and_the_identifier(more: tuple[Tensor, ...]) -> None:
    encoder = parse(request(PROMPT, COUNT, *more), streams=True).encoder
    error = GenerationError("it broke")
    assert encoder.encode(chunk("", error=error)) == b""
    response = read_stream(encoder.error(error))
    assert response.error_message == "it broke"
    assert (response.infer_response.model_name, response.infer_response.id) == ("ensemble", "7")
    assert read_stream(failure("no", request())).infer_response.id == "7"


def test_tokens_before_an_error_are_sent() -> None:
    encoder = parse(request(PROMPT, COUNT, STREAM), streams=True).encoder
    response = read_stream(encoder.encode(chunk("upon", error=GenerationError("it broke"))))
    assert outputs(response.infer_response)["text_output"][1][4:] == b"upon"


def contents(name: str, datatype: str, field: str, values: list[Any], shape: tuple[int, ...] = (1, 1)) -> Any:
    made = request()
    for each, kind, where, given in (
        ("text_input", "BYTES", "bytes_contents", [b"once"]),
        ("max_tokens", "INT32", "int_contents", [4]),
    ):
        if each != name:
            getattr(made.inputs.add(name=each, datatype=kind, shape=(1, 1)).contents, where).extend(given)
    getattr(made.inputs.add(name=name, datatype=datatype, shape=shape).contents, field).extend(values)
    return made


@pytest.mark.parametrize(
    ("name", "datatype", "field", "values"),
    [
        ("text_input", "BYTES", "bytes_contents", [b"once"]),
        ("max_tokens", "INT64", "int64_contents", [4]),
        ("max_tokens", "UINT8", "uint_contents", [4]),
        ("random_seed", "UINT64", "uint64_contents", [2**63]),
        ("temperature", "FP32", "fp32_contents", [0.5]),
        ("temperature", "FP64", "fp64_contents", [0.5]),
        ("return_log_probs", "BOOL", "bool_contents", [True]),
    ],
)
def test_elements_may_be_in_the_message(name: str, datatype: str, field: str, values: list[Any]) -> None:
    (generation,) = parse(contents(name, datatype, field, values)).requests
    assert (generation.prompt, generation.sampling.max_new_tokens) == ("once", 4)


def refused() -> dict[str, Any]:
    """A message for each text."""
    raw = request(PROMPT, COUNT)
    raw.raw_input_contents.pop()
    both = request(PROMPT, COUNT)
    both.inputs[0].contents.bytes_contents.append(b"once")
    shared = request(PROMPT, COUNT)
    shared.inputs[1].parameters["shared_memory_region"].string_param = "r"
    classes = request(PROMPT, COUNT)
    classes.outputs.add(name="text_output").parameters["classification"].int64_param = 1
    many = request(*[PROMPT] * 65)
    wanted = request(PROMPT, COUNT)
    wanted.outputs.add(name="context_logits")
    half = request(
        Tensor("text_input", "BYTES", (2, 1), ["a", "b"]),
        Tensor("max_tokens", "INT32", (2, 1), [4, 4]),
        Tensor("stream", "BOOL", (2, 1), [True, False]),
    )
    return {
        "raw_input_contents has 1 tensors for 2 inputs": raw,
        "has contents, and raw_input_contents are given": both,
        '"shared_memory_region" of input "max_tokens" is not available': shared,
        '"classification" of output "text_output" is not available': classes,
        "65 inputs: expected at most 64": many,
        "'context_logits' is not available": wanted,
        "differ in 'stream'": half,
        'unexpected inference input "hen"': request(PROMPT, COUNT, Tensor("hen", "INT32", (1, 1), [1])),
        "expected int_contents": contents("max_tokens", "INT32", "int64_contents", [4]),
        "expected raw_input_contents": contents("temperature", "FP16", "fp32_contents", [4.0]),
        "not UTF-8": contents("text_input", "BYTES", "bytes_contents", [b"\xff"]),
        "2 elements: expected 1": contents("max_tokens", "INT32", "int_contents", [4, 5]),
        "expected at most 8192": contents("stop_words", "BYTES", "bytes_contents", [], (1, 2**30)),
        "expected numbers from 0": contents("max_tokens", "INT32", "int_contents", [4], (-1, 1)),
        "'text_input' is required": request(COUNT),
    }


@pytest.mark.parametrize("message", refused())
def test_what_is_refused(message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(refused()[message], streams=True)
    assert message in str(caught.value)


def test_one_response_alone_is_no_stream() -> None:
    with pytest.raises(InvalidRequestError, match="use ModelStreamInfer"):
        parse(request(PROMPT, COUNT, STREAM))


def test_parameters_are_inputs_too() -> None:
    made = request(PROMPT)
    made.parameters["max_tokens"].int64_param = 9
    (generation,) = parse(made).requests
    assert generation.sampling.max_new_tokens == 9


def test_the_last_sequence_of_many_has_its_log_probabilities() -> None:
    made = request(
        Tensor("text_input", "BYTES", (2, 1), ["a", "b"]),
        Tensor("max_tokens", "INT32", (2, 1), [4, 4]),
        Tensor("num_return_sequences", "INT32", (2, 1), [3, 3]),
        Tensor("return_log_probs", "BOOL", (2, 1), [True, True]),
        Tensor("stream", "BOOL", (2, 1), [True, True]),
    )
    encoder = parse(made, streams=True).encoder
    shown = outputs(read_stream(encoder.encode(chunk("x", 2, generation=1))).infer_response)
    assert (shown["sequence_index"][1], shown["cum_log_probs"][1]) == (b"\x02\0\0\0", b"\0\0\0\xbf")
    assert not encoder.wants_prompt_tokens
