"""Bodies that nobody would send: each is a request or an error of the request, never a defect."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.api import RawRequest
from djl_trtllm.api.triton.generate import parse_generate
from djl_trtllm.api.triton.infer import parse_infer
from djl_trtllm.api.triton.inputs import BLS_INPUTS, INPUTS
from djl_trtllm.errors import RequestError
from tests.api.triton.played import PlayedModel

NAMES = st.sampled_from([each.name for each in (*INPUTS, *BLS_INPUTS)]) | st.text(max_size=5)
DATATYPES = st.sampled_from(["BYTES", "INT32", "UINT64", "FP16", "FP32", "BF16", "BOOL", "", None, 7])
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8)
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2))
SIZES = st.integers(-2, 40) | SCALARS
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": NAMES,
        "datatype": DATATYPES,
        "shape": st.lists(st.integers(0, 3), max_size=3) | VALUES,
        "data": VALUES,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": SIZES}) | VALUES,
    },
)
REQUIRED: list[dict[str, Any]] = [
    {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
    {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [3]},
]


def parse(parser: Any, body: bytes, headers: dict[str, str]) -> None:
    with contextlib.suppress(RequestError):
        parser(RawRequest(body, headers, "/v2/models/{model}/generate"), PlayedModel(), "ensemble")


@given(values=st.dictionaries(NAMES, VALUES, max_size=5))
def test_generate(values: dict[str, Any]) -> None:
    parse(parse_generate, orjson.dumps({"text_input": "a", "max_tokens": 3} | values), {})


@given(tensors=st.lists(TENSORS, max_size=3), members=st.dictionaries(NAMES, VALUES, max_size=1), raw=st.binary())
def test_infer_with_tensors(tensors: list[Any], members: dict[str, Any], raw: bytes) -> None:
    payload = orjson.dumps({"inputs": [*REQUIRED, *tensors], **members})
    parse(parse_infer, payload + raw, {"inference-header-content-length": str(len(payload))})


@given(tensors=st.lists(VALUES, max_size=3), outputs=VALUES, parameters=VALUES)
def test_infer_with_anything_in_the_place_of_tensors(tensors: list[Any], outputs: Any, parameters: Any) -> None:
    parse(parse_infer, orjson.dumps({"inputs": tensors, "outputs": outputs, "parameters": parameters}), {})


@given(body=st.binary(), length=st.text(max_size=4), encoding=st.sampled_from(["", "gzip", "deflate"]))
def test_bytes_and_headers(body: bytes, length: str, encoding: str) -> None:
    parse(parse_infer, body, {"inference-header-content-length": length, "content-encoding": encoding})
    parse(parse_generate, body, {"content-encoding": encoding})
