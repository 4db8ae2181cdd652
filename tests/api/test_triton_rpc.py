from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from msgspec.structs import replace
from tritonclient.grpc import model_config_pb2, service_pb2

from djl_trtllm.api.base import Call, ModelStatus, Prompt
from djl_trtllm.api.dialects.triton import rpc
from djl_trtllm.api.dialects.triton.rpc import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
    failure,
    parse_rpc,
    require_little_work,
)
from djl_trtllm.api.dialects.triton.tensors import Tensor, to_bytes
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import TritonModel
from djl_trtllm.errors import GenerationError, InvalidRequestError, UnknownModelError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.models import PlayedModel
from tests.support.tables import by_rows

SERVED = rpc.TritonRpc()
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


def whole(made: Any, *texts: str) -> Any:
    """The one response to a request, with these pieces of text."""
    encoder = parse(made).encoder
    encoder.begin(Prompt("once", 1))
    *before, last = texts
    assert [encoder.encode(chunk(text)) for text in before] == [b""] * len(before)
    return ModelInferResponse.FromString(encoder.encode(chunk(last, ends=True)))


def test_a_whole_response() -> None:
    (generation,) = parse(request(PROMPT, COUNT)).requests
    assert (generation.prompt, generation.sampling.max_new_tokens) == ("once", 4)
    response = whole(request(PROMPT, COUNT), "upon", " a")
    assert (response.model_name, response.model_version, response.id) == ("ensemble", "1", "7")
    assert set(response.parameters) == {"sequence_id", "sequence_start", "sequence_end"}
    assert list(outputs(response)) == ["text_output", "cum_log_probs", "output_log_probs"]
    assert outputs(response)["text_output"] == ([1], b"\x06\x00\x00\x00upon a")
    assert outputs(response)["output_log_probs"] == ([1, 1, 2], bytes(8))
    response = whole(request(PROMPT, COUNT, Tensor("exclude_input_in_output", "BOOL", (1, 1), [False])), " upon")
    assert outputs(response)["text_output"][1][4:] == b"once upon"
    made = request(PROMPT, COUNT)
    made.outputs.add(name="sequence_index")
    assert outputs(whole(made, "upon")) == {"sequence_index": ([1, 1], bytes(4))}


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
    encoder = parse(request(PROMPT, COUNT, STREAM), streams=True).encoder
    only = read_stream(encoder.encode(chunk("", ends=True))).infer_response  # the end alone, as there was none before
    assert (outputs(only)["text_output"], encoder.end()) == (([1], bytes(4)), b"")


@pytest.mark.parametrize("last", ["", "b"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_seeded_request_that_went_on_says_so_in_a_parameter(last: str, streams: bool) -> None:
    tensors = (PROMPT, COUNT, *[STREAM] * streams)
    encoder: Any = parse(request(*tensors), streams=streams).encoder
    encoder.begin(Prompt("once", 1))
    ended = chunk(last, ends=True)
    assert ended.finished is not None
    reseeded = OutputChunk(0, ended.tokens, replace(ended.finished, reseeded=True), 0)
    sent = [data for data in (encoder.encode(chunk("a")), encoder.encode(reseeded)) if data]
    read = [read_stream(data).infer_response if streams else ModelInferResponse.FromString(data) for data in sent]
    assert ["reseeded" in response.parameters for response in read] == [False] * streams + [True]


def test_responses_of_several_prompts_and_sequences_have_their_indices() -> None:
    made = request(
        Tensor("text_input", "BYTES", (2, 1), ["a", "b"]),
        Tensor("max_tokens", "INT32", (2, 1), [4, 4]),
        Tensor("num_return_sequences", "INT32", (2, 1), [3, 3]),
        Tensor("return_log_probs", "BOOL", (2, 1), [True, True]),
        Tensor("stream", "BOOL", (2, 1), [True, True]),
    )
    encoder = parse(made, streams=True).encoder
    assert not encoder.wants_prompt_tokens
    shown = outputs(read_stream(encoder.encode(chunk("x", 2, generation=1))).infer_response)
    assert (shown["batch_index"], shown["sequence_index"]) == (([1, 1], b"\x01\0\0\0"), ([1, 1], b"\x02\0\0\0"))
    numbers = [(shown["cum_log_probs"], shown["output_log_probs"])]
    shown = outputs(read_stream(encoder.encode(chunk("y", 2, generation=1))).infer_response)
    numbers.append((shown["cum_log_probs"], shown["output_log_probs"]))
    sums = [to_bytes(Tensor("", "FP32", (1,), [value])) for value in (-0.5, -1.0)]
    assert numbers == [(([1, 1], each), ([1, 1, 1], sums[0])) for each in sums]


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
    before = encoder.encode(chunk("upon", error=error))
    assert (b"upon" in before) is bool(more)
    response = read_stream(encoder.error(error))
    assert response.error_message == "it broke"
    assert (response.infer_response.model_name, response.infer_response.id) == ("ensemble", "7")
    assert read_stream(failure("no", "ensemble", "8")).infer_response.id == "8"


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


@by_rows(
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


@by_rows("message", refused())
def test_what_is_refused(message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(refused()[message], streams=True)
    assert message in str(caught.value)


def test_one_response_alone_is_no_stream() -> None:
    with pytest.raises(InvalidRequestError, match="use ModelStreamInfer"):
        parse(request(PROMPT, COUNT, STREAM))


def test_no_response_has_a_long_id_or_name() -> None:
    made = request(PROMPT)
    made.id = "7" * 1025
    with pytest.raises(InvalidRequestError, match="'id' has 1025 characters: expected at most 1024"):
        parse(made)
    assert len(rpc.failure("no", "m" * 10**6, "7" * 10**6)) < 5000


def test_parameters_are_inputs_too() -> None:
    made = request(PROMPT)
    made.parameters["max_tokens"].int64_param = 9
    (generation,) = parse(made).requests
    assert generation.sampling.max_new_tokens == 9


PACKAGE = Path(rpc.__file__).parent


def ours() -> descriptor_pb2.FileDescriptorProto:
    (file,) = descriptor_pb2.FileDescriptorSet.FromString((PACKAGE / "grpc_service.binpb").read_bytes()).file
    return file


def theirs(name: str) -> Any:
    found = service_pb2.DESCRIPTOR.message_types_by_name.get(name)
    return found or model_config_pb2.DESCRIPTOR.message_types_by_name[name]


def fields(message: Any) -> dict[str, tuple[int, int, int, str]]:
    """Number, kind, label and what it holds, of each field."""
    described = descriptor_pb2.DescriptorProto()
    message.CopyToProto(described)
    return {field.name: (field.number, field.type, field.label, field.type_name) for field in described.field}


def compare(message: Any, original: Any) -> None:
    expected = fields(original)
    assert {name: expected.get(name) for name in fields(message)} == fields(message), message.full_name
    for nested in message.nested_types:
        compare(nested, original.nested_types_by_name[nested.name])


@by_rows("name", [message.name for message in ours().message_type])
def test_messages_are_those_of_tritons_client(name: str) -> None:
    compare(rpc.message_class(name).DESCRIPTOR, theirs(name))


def test_methods_are_those_of_tritons_client() -> None:
    known = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert known.full_name == rpc.SERVICE
    (service,) = ours().service
    assert {method.name for method in service.method} == {SERVED.unary, SERVED.stream, *SERVED.pages}
    assert {*known.methods_by_name} == {*SERVED.refused, *(method.name for method in service.method)}
    for method in service.method:
        original = known.methods_by_name[method.name]
        assert method.input_type == f".{original.input_type.full_name}"
        assert method.output_type == f".{original.output_type.full_name}"
        assert (method.client_streaming, method.server_streaming) == (
            original.client_streaming,
            original.server_streaming,
        )


def test_datatypes_are_those_of_tritons_client() -> None:
    (datatypes,) = ours().enum_type
    known = model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"]
    assert {value.name: value.number for value in datatypes.value} == {
        value.name: value.number for value in known.values
    }


def test_the_descriptors_are_made_of_the_proto_file(tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("needs grpcio-tools")
    made = tmp_path / "made"
    # In a process of its own: with protoc's library loaded, SentencePiece's trainer ends the process.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PACKAGE}", f"--descriptor_set_out={made}"]
    subprocess.run([*command, "grpc_service.proto"], check=True)
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    assert file == ours(), "run the command that grpc_service.proto names"


LARGE = 100_000


def field(number: int, data: bytes) -> bytes:
    """A field of text, bytes, packed numbers or a message."""
    size, length = len(data), []
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + data


INPUTS, PARAMETERS, RAW, CONTENTS, INT, BYTES, SHAPE = 5, 4, 7, 5, 2, 8, 3
UNKNOWN = b"\xf8\x07\x01"


def check(data: bytes) -> None:
    require_little_work(data, ModelInferRequest.DESCRIPTOR)


def of_tensor(contents: bytes) -> bytes:
    return field(INPUTS, field(CONTENTS, contents))


@by_rows(
    ("data", "most"),
    [
        (field(INPUTS, b""), 5000),
        (field(RAW, b""), 5000),
        (field(PARAMETERS, field(1, b"a")), 2500),
        (UNKNOWN, 5000),
        (b"\xf9\x07" + bytes(8), 5000),
        (b"\xfd\x07" + bytes(4), 5000),
        (field(14, b"\xff\xff"), 5000),
    ],
)
def test_fields_are_counted_in_every_message_of_a_message(data: bytes, most: int) -> None:
    padding = field(RAW, b"x" * LARGE)
    check(padding + data * (most - 1))
    with pytest.raises(InvalidRequestError, match=f"too many fields .* of its {len(padding) + len(data) * most} bytes"):
        check(data * most + padding)


@pytest.mark.parametrize("number", [BYTES, 1])
def test_fields_deep_within_are_counted(number: int) -> None:
    element = field(number, b"")
    check(of_tensor(element * 4000 + field(BYTES, b"x" * LARGE)))
    with pytest.raises(InvalidRequestError, match="too many fields"):
        check(of_tensor(element * 5000 + field(BYTES, b"x" * LARGE)))


def test_packed_numbers_are_counted_and_texts_are_not() -> None:
    check(of_tensor(field(INT, b"\x01" * 390_000)))
    check(of_tensor(field(BYTES, b"\x01" * 5_000_000)))
    check(field(RAW, b"\x01" * 5_000_000))
    for data in (of_tensor(field(INT, b"\x01" * 400_000)), field(INPUTS, field(SHAPE, b"\x01" * 400_000))):
        with pytest.raises(InvalidRequestError, match="too many fields"):
            check(data)


def test_a_small_message_is_not_looked_at() -> None:
    check(UNKNOWN * (32_768 // 3))


@pytest.mark.parametrize("end", [b"\x08" + b"\xff" * 11, b"\x08", field(INPUTS, b"ab")[:-1], b"\x09", b"\x0d\x00"])
def test_what_is_damaged_is_left_to_the_parser(end: bytes) -> None:
    check(field(RAW, b"x" * LARGE) + end)


@pytest.mark.parametrize("wire", [3, 4, 6, 7])
def test_other_fields_are_refused(wire: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"a field has wire type {wire}"):
        check(bytes([8 | wire]) * LARGE)


class PlayedLookup:
    """The models of a server: one that is ready, and one that is loading."""

    def all(self) -> list[ModelStatus]:
        return [
            ModelStatus("story", True, PlayedModel(), Statistics()),
            ModelStatus("fable", False, None, Statistics()),
        ]

    def find(self, name: str) -> ModelStatus:
        found = {each.name: each for each in self.all()}.get(name)
        if found is None:
            raise UnknownModelError(f"no model {name!r}", name=name)
        return found


@pytest.mark.parametrize(
    ("method", "asked", "read"),
    [
        ("ServerLive", {}, lambda found: found.live is True),
        ("ServerReady", {}, lambda found: found.ready is False),
        ("ServerMetadata", {}, lambda found: found.name == "djl-trtllm" and found.extensions),
        ("ModelReady", {"name": "story"}, lambda found: found.ready is True),
        ("ModelReady", {"name": "fable"}, lambda found: found.ready is False),
        ("ModelReady", {"name": "hen"}, lambda found: found.ready is False),
        ("ModelMetadata", {"name": "story"}, lambda found: found.inputs[0].datatype == "BYTES"),
        ("ModelConfig", {"name": "story"}, lambda found: found.config.max_batch_size > 0),
        ("ModelStatistics", {"name": "story"}, lambda found: [each.name for each in found.model_stats] == ["story"]),
        ("ModelStatistics", {}, lambda found: {each.name for each in found.model_stats} == {"story", "fable"}),
        ("RepositoryIndex", {}, lambda found: {"story", "fable"} <= {each.name for each in found.models}),
        ("RepositoryIndex", {"ready": True}, lambda found: "fable" not in {each.name for each in found.models}),
    ],
)
def test_each_page_is_a_message_of_tritons_client(method: str, asked: dict[str, Any], read: Any) -> None:
    message = getattr(service_pb2, f"{method}Request")(**asked).SerializeToString()
    found = getattr(service_pb2, f"{method}Response").FromString(SERVED.page(method, message, PlayedLookup()))
    assert read(found)


def test_a_page_is_asked_for_by_a_small_valid_message_that_names_a_version_that_is_here() -> None:
    for message, error in (
        (b"\xff", "not a valid inference.ModelConfigRequest"),
        (b"x" * 100_000, "has 100000 bytes"),
        (service_pb2.ModelConfigRequest(name="story", version="2").SerializeToString(), "no version '2'"),
        (service_pb2.ModelConfigRequest(name="hen").SerializeToString(), "no model 'hen'"),
    ):
        with pytest.raises((InvalidRequestError, UnknownModelError), match=error):
            SERVED.page("ModelConfig", message, PlayedLookup())


def test_an_error_ends_a_stream_where_its_client_asks_for_grpcs_errors() -> None:
    for metadata, ends in ({"triton_grpc_error": "true"}, True), ({"triton_grpc_error": "false"}, False), ({}, False):
        assert SERVED.error_ends_stream(metadata) is ends


def test_a_stream_of_the_llm_api_has_the_text_so_far_in_each_response() -> None:
    tensors = (
        Tensor("text_input", "BYTES", (1,), ["once"]),
        Tensor("streaming", "BOOL", (1,), [True]),
        Tensor("return_finish_reason", "BOOL", (1,), [True]),
    )
    call = parse(request(*tensors), streams=True, triton_model=TritonModel.LLMAPI)
    call.encoder.begin(Prompt("once", 1))
    messages = [call.encoder.encode(each) for each in (chunk(" upon"), chunk(" a time", ends=True))]
    found = [outputs(ModelStreamInferResponse.FromString(message).infer_response) for message in messages]
    texts, reasons = ([b"\5\0\0\0 upon", b"\14\0\0\0 upon a time"], [b"\4\0\0\0None", b"\6\0\0\0length"])
    assert found == [
        {"text_output": ([1], text), "finish_reason": ([1], reason)}
        for text, reason in zip(texts, reasons, strict=True)
    ]
    failed = GenerationError("it failed")
    last = ModelStreamInferResponse.FromString(call.encoder.encode(chunk(" a wolf", error=failed))).infer_response
    assert outputs(last)["text_output"] == ([1], b"\23\0\0\0 upon a time a wolf")
    assert call.encoder.encode(chunk("", error=failed)) == b""
