"""Parses TGI's requests: `{"inputs", "parameters", "stream"}`.

Source: `router/src/lib.rs` of TGI (db931fc). A request samples if `do_sample` is true, or if `temperature`, `top_k` or
`top_p` asks for it. `best_of` generates as many sequences and returns them all, the best first.
"""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.base import Call, RawRequest
from djl_trtllm.api.parameters import (
    BOOLEAN,
    IGNORED,
    PROMPT,
    Parameter,
    Problems,
    Table,
    check_text,
    integer,
    number,
    read_object,
    show,
)
from djl_trtllm.api.sampling import ADAPTER, MOST_TOKENS, NOT_HONOURED, SAMPLING, generation_request, read_sampling
from djl_trtllm.api.tgi.encoders import GenerateEncoder, GenerateStreamEncoder, Shown
from djl_trtllm.api.tgi.timing import Timing, stream_headers
from djl_trtllm.config import Options

_DEFAULT_NEW_TOKENS = 100

PARAMETERS = Table(
    SAMPLING,
    ADAPTER,
    NOT_HONOURED,
    (
        Parameter(("max_new_tokens",), integer(1, MOST_TOKENS), "max_new_tokens"),
        Parameter(("temperature",), number(0), "temperature"),
        Parameter(("details",), BOOLEAN, "details"),
        Parameter(("return_full_text",), BOOLEAN, "return_full_text"),
        Parameter(("decoder_input_details",), BOOLEAN, "prefill"),
    ),
    elsewhere=dict.fromkeys(("inputs", "stream"), "beside 'parameters', not in it"),
)
"""`parameters`."""

FIELDS = Table(
    (
        Parameter(("inputs",), PROMPT, "inputs"),
        Parameter(("parameters",), PARAMETERS.kind, IGNORED),
        Parameter(("stream",), BOOLEAN, "stream"),
        Parameter(("model",), target=IGNORED),
        # Clients of Hugging Face's hosted inference API send it to every server.
        Parameter(("options",), target=IGNORED),
    ),
    elsewhere=dict.fromkeys(("max_new_tokens", "temperature", "do_sample", "details"), "in 'parameters'")
    | {"messages": "to /v1/chat/completions"},
    required=("inputs",),
)
"""The body."""


def parse(request: RawRequest, options: Options) -> Call:
    """Read a body. On `/generate_stream` the response is a stream, on `/` if `stream` says so. Raises
    InvalidRequestError.
    """
    payload, problems = read_object(request, "inputs"), Problems.of(options)
    fields = FIELDS.read(payload, problems, "field")
    inputs: str = fields.get("inputs", "")
    check_text(payload, "inputs", problems)
    parameters: Any = payload.get("parameters")
    if parameters is None:
        parameters = {}
    elif type(parameters) is not dict:
        problems.invalid.append(f"'parameters' is {show(parameters)}: expected an object")
        parameters = {}
    values = PARAMETERS.read(parameters, problems, "parameter")
    values["default_new_tokens"] = _DEFAULT_NEW_TOKENS
    if "best_of" in values:
        values.setdefault("n", values["best_of"])
    sampling = read_sampling(values, problems, ranked=True)
    stream = request.path == "/generate_stream" or (request.path == "/" and fields.get("stream", False))
    if stream and sampling.sequences > 1:
        problems.invalid.append("'best_of' is above 1: expected 1 in a stream, where the best is not known")
    if stream and values.get("prefill"):
        problems.invalid.append("'decoder_input_details' is true: expected false in a stream")
    problems.raise_any()
    shown = Shown(
        # As TGI: the tokens of the prompt have their place in the details.
        details=values.get("details", False) or values.get("prefill", False) or sampling.n > 1,
        full_text=values.get("return_full_text", False),
        prefill=values.get("prefill", False),
        as_list=request.path == "/",
        n=sampling.n,
    )
    generation = generation_request(values, sampling, stream or shown.details, prompt=inputs)
    if stream:
        return Call((generation,), GenerateStreamEncoder(shown), (*problems.headers, *stream_headers(len(inputs))))
    encoder = GenerateEncoder(shown, Timing(len(inputs)))
    return Call((generation,), encoder, problems.headers, encoder.headers)
