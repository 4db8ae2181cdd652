from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from djl_trtllm.api.triton import protocol

PACKAGE = Path(protocol.__file__).parent


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


@pytest.mark.parametrize("name", [message.name for message in ours().message_type])
def test_messages_are_those_of_tritons_client(name: str) -> None:
    compare(protocol.message(name).DESCRIPTOR, theirs(name))


def test_methods_are_those_of_tritons_client() -> None:
    known = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert known.full_name == protocol.SERVICE
    for method in protocol.methods():
        original = known.methods_by_name[method.name]
        assert method.input_type.full_name == original.input_type.full_name
        assert method.output_type.full_name == original.output_type.full_name
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
