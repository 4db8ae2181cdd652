"""Inputs of tritonclient, over HTTP and gRPC."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

_KINDS = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "FP32": np.float32,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}


def tensor(triton: ModuleType, name: str, values: list[Any], datatype: str, **how: Any) -> Any:
    """An input of one row, or of several where `values` are lists.

    `triton` is `tritonclient.http` or `tritonclient.grpc`; `how` goes to `set_data_from_numpy`.
    """
    rows = values if isinstance(values[0], list) else [values]
    array = np.array(rows, _KINDS[datatype])
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array, **how)
    return made


def prompt_tensors(triton: ModuleType, text: str, tokens: int, *, stream: bool | None = None, **how: Any) -> list[Any]:
    """The inputs of a request, `stream` among them where it is not None."""
    given = [
        tensor(triton, "text_input", [text], "BYTES", **how),
        tensor(triton, "max_tokens", [tokens], "INT32", **how),
    ]
    return given if stream is None else [*given, tensor(triton, "stream", [stream], "BOOL", **how)]
