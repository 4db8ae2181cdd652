"""The messages of Triton's gRPC API, by name.

They are made from the descriptors of `grpc_service.proto`, in a pool of their own: generated modules would need the
version of protobuf that they were generated for, and would clash with those of Triton's client in the same process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"

_FILE = Path(__file__).with_name("grpc_service.binpb")


def _load() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(_FILE.read_bytes()).file:
        pool.Add(file)
    return pool


_POOL = _load()


def message(name: str) -> Any:
    """The class of a message of the protocol."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


def methods() -> list[Any]:
    """The descriptors of the service's methods."""
    return list(_POOL.FindServiceByName(SERVICE).methods)


ModelInferRequest = message("ModelInferRequest")
ModelInferResponse = message("ModelInferResponse")
ModelStreamInferResponse = message("ModelStreamInferResponse")
