"""The inputs of Triton's TensorRT-LLM models, and reading a request from named values.

Source: `ensemble/config.pbtxt` and `tensorrt_llm_bls/config.pbtxt` of tensorrtllm_backend v0.19 (34 and 6 more inputs).
Where values come from (JSON, tensors over HTTP, tensors over gRPC) makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from djl_trtllm.api.base import ModelContext
from djl_trtllm.api.guides import GUIDES
from djl_trtllm.api.parameters import (
    BOOLEAN,
    IGNORED,
    TEXT,
    Kind,
    Parameter,
    Problems,
    Table,
    integer,
    number,
    read_words,
    show,
)
from djl_trtllm.api.sampling import ADAPTER, MOST_TOKENS, SAMPLING, generation_request, read_sampling
from djl_trtllm.request import GenerationRequest, Guide

STREAM_NEEDS_DECOUPLED = "Streaming is only supported if model is deployed using decoupled mode."
"""Triton's text, for a model with `decoupled=false`."""

_SHARED = {name: row.kind for row in SAMPLING for name in row.names}
_GUIDES = {name: row.kind for row in GUIDES for name in row.names}
_GUIDE_TYPES = {
    "json": "guided_json",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf_grammar": "guided_grammar",
    "grammar": "guided_grammar",
}
"""Guide types of TensorRT-LLM's executor, each with the shared parameter that reads such a guide."""

_TOP_P = number(0, 1, above=True)


def _read_top_p(value: Any) -> float:
    """In Triton 0 and less mean that it is not set."""
    if type(value) in (int, float) and -1 <= value <= 0:
        return 1.0
    top_p: float = _TOP_P.read(value)
    return top_p


def _read_task(value: Any) -> str:
    return str(integer(0, 2**64 - 1).read(value))


_WORDS = Kind('a string or a list of strings, of which "" mean none', read_words)
_NO_LOGITS = "logits stay in the engine; 'return_log_probs' gives the log-probabilities of the tokens"
_NO_BIAS = "no engine here has biases of tokens; use 'bad_words'"
_NO_TABLE = "prompts are text only"
_NO_WEIGHTS = "register the adapter with the server, under its 'lora_task_id' as a name"


class Input(NamedTuple):
    """One input: `row` says what its value means. `dims` have no batch dimension, -1 is any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    row: Parameter
    optional: bool = True


def _scalar(name: str, datatype: str, kind: Kind | None, target: str, **more: bool) -> Input:
    return Input(name, datatype, (1,), Parameter((name,), kind, target), **more)


def _refused(name: str, datatype: str, dims: tuple[int, ...], advice: str, neutral: tuple[object, ...] = ()) -> Input:
    return Input(name, datatype, dims, Parameter((name,), neutral=neutral, advice=advice))


INPUTS = (
    _scalar("text_input", "BYTES", TEXT, "prompt", optional=False),
    _refused("decoder_text_input", "BYTES", (1,), "models with an encoder are not served", ("",)),
    _scalar("max_tokens", "INT32", integer(1, MOST_TOKENS), "max_new_tokens", optional=False),
    _scalar("num_return_sequences", "INT32", _SHARED["n"], "n"),
    Input("bad_words", "BYTES", (-1,), Parameter(("bad_words",), _WORDS, "bad")),
    Input("stop_words", "BYTES", (-1,), Parameter(("stop_words",), _WORDS, "stop")),
    _scalar("exclude_input_in_output", "BOOL", BOOLEAN, "exclude_prompt"),
    _scalar("end_id", "INT32", integer(-1, MOST_TOKENS), "end_id"),
    # What fills tensors up. There is nothing to fill in a text.
    _scalar("pad_id", "INT32", integer(-1, MOST_TOKENS), "pad_id"),
    _scalar("top_k", "INT32", _SHARED["top_k"], "top_k"),
    _scalar("top_p", "FP32", Kind(_TOP_P.expected, _read_top_p), "top_p"),
    _scalar("temperature", "FP32", number(0), "temperature"),
    _scalar("length_penalty", "FP32", _SHARED["length_penalty"], "length_penalty"),
    _scalar("repetition_penalty", "FP32", _SHARED["repetition_penalty"], "repetition_penalty"),
    _scalar("min_length", "INT32", _SHARED["min_length"], "min_new_tokens"),
    _scalar("presence_penalty", "FP32", _SHARED["presence_penalty"], "presence_penalty"),
    _scalar("frequency_penalty", "FP32", _SHARED["frequency_penalty"], "frequency_penalty"),
    _scalar("random_seed", "UINT64", _SHARED["seed"], "seed"),
    _scalar("return_log_probs", "BOOL", BOOLEAN, "logprobs"),
    _refused("return_context_logits", "BOOL", (1,), _NO_LOGITS, (False,)),
    _refused("return_generation_logits", "BOOL", (1,), _NO_LOGITS, (False,)),
    _refused("return_perf_metrics", "BOOL", (1,), "GET /metrics has durations and the use of the KV cache", (False,)),
    _scalar("beam_width", "INT32", _SHARED["beam_width"], "beam_width"),
    _scalar("stream", "BOOL", BOOLEAN, "stream"),
    _refused("prompt_embedding_table", "FP16", (-1, -1), _NO_TABLE, ([],)),
    _refused("prompt_table_extra_id", "UINT64", (1,), _NO_TABLE, (0,)),
    _refused("prompt_vocab_size", "INT32", (1,), _NO_TABLE, (0,)),
    _refused("embedding_bias_words", "BYTES", (-1,), _NO_BIAS, ("", [], [""])),
    _refused("embedding_bias_weights", "FP32", (-1,), _NO_BIAS, ([], [0.0])),
    _scalar("lora_task_id", "UINT64", Kind("the number that an adapter has as its name", _read_task), "adapter"),
    _refused("lora_weights", "FP16", (-1, -1), _NO_WEIGHTS, ([],)),
    _refused("lora_config", "INT32", (-1, 3), _NO_WEIGHTS, ([],)),
    _scalar("guided_decoding_guide_type", "BYTES", TEXT, "guide_type"),
    _scalar("guided_decoding_guide", "BYTES", TEXT, "guide_text"),
)
"""The inputs of `ensemble`, in the order of its configuration."""

BLS_INPUTS = (
    _refused("image_input", "FP16", (-1, 3, -1, -1), _NO_TABLE, ([],)),
    _refused("image_bytes_input", "UINT8", (-1, -1, -1, -1), _NO_TABLE, ([],)),
    _refused("image_url_input", "BYTES", (1,), _NO_TABLE, ("",)),
    _refused("video_bytes_input", "UINT8", (-1, -1, -1, -1), _NO_TABLE, ([],)),
    _refused("num_draft_tokens", "INT32", (1,), "a draft model is an option of the server", (0,)),
    _refused("use_draft_logits", "BOOL", (1,), "a draft model is an option of the server", (False,)),
)
"""Further inputs of `tensorrt_llm_bls`."""

_BY_NAME = {each.name: each for each in (*INPUTS, *BLS_INPUTS)}

_NO_SEQUENCES = "requests do not belong together here"
_PARAMETERS = (
    # Of older versions.
    Parameter(("return_kv_cache_reuse_stats",), neutral=(False,)),
    # Request parameters, which are no inputs.
    Parameter(("accumulate_tokens",), target=IGNORED),
    Parameter(("sequence_id",), neutral=(0, ""), advice=_NO_SEQUENCES),
    Parameter(("sequence_start",), neutral=(False,), advice=_NO_SEQUENCES),
    Parameter(("sequence_end",), neutral=(False,), advice=_NO_SEQUENCES),
    Parameter(("priority",), neutral=(0,), advice="requests run in the order of their arrival"),
    Parameter(("timeout",), neutral=(0,), advice="set option.predict_timeout"),
    Parameter(("binary_data_output",), BOOLEAN, "binary_data_output"),
    Parameter(("triton_enable_empty_final_response",), BOOLEAN, "empty_final_response"),
)

FIELDS = Table([each.row for each in (*INPUTS, *BLS_INPUTS)], ADAPTER, _PARAMETERS)
"""Inputs and request parameters, which `generate` has in one object."""


class _GenerateFields:
    """Describes the body of `generate`: any input may be in a list, and request parameters in `parameters`."""

    def schema(self) -> dict[str, Any]:
        schema = FIELDS.schema()
        inputs = {name: {"anyOf": [each, {"type": "array"}]} for name, each in schema["properties"].items()}
        return schema | {"properties": {**inputs, "id": {}, "parameters": {}}}


GENERATE_FIELDS = _GenerateFields()


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One prompt of a request, and what its response shows.

    `n` sequences. `logprobs`: their log-probabilities, which are 0 otherwise. `prompt`: whole texts begin with the
    prompt. `stream`: what the input of that name says; None without it.
    """

    generation: GenerationRequest
    n: int
    logprobs: bool
    prompt: bool
    stream: bool | None
    empty_final_response: bool = False
    binary_data_output: bool = False


def read_request(given: Mapping[str, Any], model: ModelContext, problems: Problems) -> InferenceRequest:
    """Read inputs and request parameters by name: a scalar as it is or in a list. Adds what is wrong to `problems`."""
    values = FIELDS.read(_unwrapped(given, problems), problems, "input")
    prompt = values.get("prompt", "")
    for name in ("text_input", "max_tokens"):
        if given.get(name) in (None, ""):
            problems.invalid.append(f"'{name}' is required: expected {_expected(name)}")
    if values.get("beam_width", 1) > 1:
        values.setdefault("n", values["beam_width"])
    _read_guide(values, problems)
    sampling = read_sampling(values, problems)
    logprobs: bool = values.get("logprobs", False)
    generation = generation_request(values, sampling, logprobs, prompt=prompt)
    if "end_id" in values:
        generation = _ending_at(generation, values["end_id"], model)
    if values.get("stream") and model.options.decoupled is False:
        problems.invalid.append(STREAM_NEEDS_DECOUPLED)
    if values.get("stream") and sampling.beam_width > 1:
        problems.invalid.append(
            "'beam_width' is above 1 and 'stream' true: which beam is the best shows only at the end"
        )
    return InferenceRequest(
        generation,
        sampling.n,
        logprobs,
        values.get("exclude_prompt") is False,
        values.get("stream"),
        values.get("empty_final_response", False),
        values.get("binary_data_output", False),
    )


def input_named(name: str) -> Input | None:
    return _BY_NAME.get(name)


def _expected(name: str) -> str:
    return "a text that is not empty" if name == "text_input" else "the number of tokens to generate"


def _unwrapped(given: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """The values, those of scalars without the list around them."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        described = _BY_NAME.get(name)
        if described is not None and described.dims == (1,) and type(value) is list:
            if len(value) != 1:
                problems.invalid.append(f"'{name}' has {len(value)} values: expected one")
                continue
            value = value[0]
        found[name] = value
    return found


def _read_guide(values: dict[str, Any], problems: Problems) -> None:
    kind, text = values.pop("guide_type", ""), values.pop("guide_text", "")
    if not kind and not text:
        return
    reader = _GUIDES.get(_GUIDE_TYPES.get(kind, ""))
    if reader is None:
        expected = ", ".join(_GUIDE_TYPES)
        problems.invalid.append(f"'guided_decoding_guide_type' is {show(kind)}: expected one of {expected}")
        return
    try:
        guide: Guide = reader.read(text)
    except ValueError as error:
        problems.invalid.append(f"'guided_decoding_guide' is {show(text)}: expected {reader.expected}{error}")
    else:
        values["guide"] = guide


def _ending_at(request: GenerationRequest, end_id: int, model: ModelContext) -> GenerationRequest:
    """As in TensorRT-LLM, `end_id` takes the place of the model's own end token; -1 is none."""
    tokenizer = model.tokenizer
    if end_id in tokenizer.end_ids:
        return request
    ids = (end_id,) if 0 <= end_id < tokenizer.vocab_size else ()
    return replace(request, sampling=replace(request.sampling, ignore_eos=True), stop_token_ids=ids)
