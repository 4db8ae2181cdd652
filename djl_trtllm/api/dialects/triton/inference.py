"""The inputs and outputs of Triton's TensorRT-LLM models, and reading the requests of a batch of prompts.

Sources: `ensemble/config.pbtxt` and `tensorrt_llm_bls/config.pbtxt` of tensorrtllm_backend v0.19 (34 and 6 more
inputs), and what its engine model writes: `text_output` has an element for each sequence and no batch dimension. Where
values come from (JSON, tensors over HTTP, tensors over gRPC) makes no difference. Tensors are flat lists of
Python values here. Everything about them is checked before they are unpacked, so that the sizes that a request states
cost nothing by themselves.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from djl_trtllm.api import parameters as kinds
from djl_trtllm.api.base import ModelContext, Prompt, WholeEncoder
from djl_trtllm.api.parameters import IGNORED, Kind, Parameter, Problems, Table, read_words, show
from djl_trtllm.api.sampling import ADAPTER, GUIDES, MOST_TOKENS, SAMPLING, generation_request, read_sampling
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.request import GenerationRequest, Guide

BYTES = "BYTES"
BOOL = "BOOL"
_BFLOAT16 = "BF16"
_CODES = {
    BOOL: "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    _BFLOAT16: "H",
}
"""`struct`'s codes of the datatypes with elements of one size."""
_LENGTH = struct.Struct("<I")
_MOST_DIMENSIONS = 8

MOST_ELEMENTS = 8192
"""The most elements of one tensor: more prompts, each with as many words as a request may have, are refused."""


class Tensor(NamedTuple):
    """`data` has the elements in row-major order; those of BYTES are strings."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any]


def check(name: str, datatype: Any, shape: Any) -> int:
    """The number of elements of such a tensor. Raises InvalidRequestError."""
    if type(datatype) is not str or (datatype != BYTES and datatype not in _CODES):
        raise InvalidRequestError(
            f"input '{name}' has the datatype {show(datatype)}: expected one of {', '.join((*_CODES, BYTES))}"
        )
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) > _MOST_DIMENSIONS:
        raise InvalidRequestError(
            f"input '{name}' has the shape {show(shape)}: expected a list of up to {_MOST_DIMENSIONS} numbers"
        )
    if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise InvalidRequestError(f"input '{name}' has the shape {show(list(shape))}: expected numbers from 0")
    count = math.prod(shape)
    if count > MOST_ELEMENTS:
        raise InvalidRequestError(
            f"input '{name}' has {count} elements, of the shape {show(list(shape))}: expected at most {MOST_ELEMENTS}"
        )
    return count


def from_bytes(name: str, datatype: Any, shape: Any, raw: bytes) -> Tensor:
    """A tensor from its bytes: little-endian elements, strings after their length. Raises InvalidRequestError."""
    count = check(name, datatype, shape)
    if datatype == BYTES:
        return Tensor(name, datatype, tuple(shape), _strings(name, count, raw))
    layout = struct.Struct(f"<{count}{_CODES[datatype]}")
    if len(raw) != layout.size:
        raise InvalidRequestError(
            f"input '{name}' has {len(raw)} bytes: expected {layout.size}, for {count} elements of {datatype}"
        )
    data: list[Any] = list(layout.unpack(raw))
    if datatype == _BFLOAT16:
        # The upper half of a 32-bit float.
        data = list(struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(value << 16 for value in data))))
    return Tensor(name, datatype, tuple(shape), data)


def from_json(name: str, datatype: Any, shape: Any, data: Any) -> Tensor:
    """A tensor from JSON, where `data` is flat or nested as the shape says. Raises InvalidRequestError."""
    count = check(name, datatype, shape)
    values = data if type(data) is list else [data]
    if len(values) > MOST_ELEMENTS:
        raise InvalidRequestError(f"input '{name}' has {len(values)} elements: expected {count}, as the shape says")
    for _ in range(_MOST_DIMENSIONS):
        if not any(type(value) is list for value in values):
            break
        # Counted first: what is nested may be much more than the shape says.
        if sum(len(value) if type(value) is list else 1 for value in values) > MOST_ELEMENTS:
            raise InvalidRequestError(f"input '{name}' has too many elements: expected {count}, as the shape says")
        values = [inner for value in values for inner in (value if type(value) is list else [value])]
    if len(values) != count:
        raise InvalidRequestError(
            f"input '{name}' has {len(values)} elements: expected {count}, for the shape {show(list(shape))}"
        )
    types = {BYTES: (str,), BOOL: (bool,)}.get(datatype, (int, float))
    for value in values:
        if type(value) not in types:
            raise InvalidRequestError(f"input '{name}' has {show(value)}: expected elements of {datatype}")
    return Tensor(name, datatype, tuple(shape), values)


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, the reverse of `from_bytes`. BF16 is not written."""
    if tensor.datatype == BYTES:
        encoded = [value.encode("utf-8", "replace") for value in tensor.data]
        return b"".join([_LENGTH.pack(len(value)) + value for value in encoded])
    return struct.pack(f"<{len(tensor.data)}{_CODES[tensor.datatype]}", *tensor.data)


def _strings(name: str, count: int, raw: bytes) -> list[Any]:
    strings: list[Any] = []
    at = 0
    while at < len(raw) and len(strings) < count:
        if at + _LENGTH.size > len(raw):
            break
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if at + length > len(raw):
            raise InvalidRequestError(
                f"input '{name}' has an element of {length} bytes where {len(raw) - at} are left: expected each "
                "element to be its length, 4 bytes, and its text"
            )
        try:
            strings.append(raw[at : at + length].decode())
        except UnicodeDecodeError:
            raise InvalidRequestError(f"input '{name}' is not UTF-8 text") from None
        at += length
    if len(strings) != count or at != len(raw):
        raise InvalidRequestError(
            f"input '{name}' has {len(strings)} elements in {at} of its {len(raw)} bytes: expected {count} elements"
        )
    return strings


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

_TOP_P = kinds.number(0, 1, above=True)


def _read_top_p(value: Any) -> float:
    """In Triton 0 and less mean that it is not set."""
    if type(value) in (int, float) and -1 <= value <= 0:
        return 1.0
    top_p: float = _TOP_P.read(value)
    return top_p


def _read_task(value: Any) -> str:
    return str(kinds.integer(0, 2**64 - 1).read(value))


_WORDS = Kind('a string or a list of strings ("" means none)', read_words)
_NO_LOGITS = "logits stay in the engine; 'return_log_probs' gives the log-probabilities of the tokens"
_NO_BIAS = "no engine here has biases of tokens; use 'bad_words'"
_NO_TABLE = "prompts are text only"
_NO_WEIGHTS = "register the adapter with the server, under its 'lora_task_id' as a name"


class InputSpec(NamedTuple):
    """One input: `row` says what its value means. `dims` have no batch dimension, -1 is any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    row: Parameter
    optional: bool = True


def _scalar(name: str, datatype: str, kind: Kind | None, target: str, **more: bool) -> InputSpec:
    return InputSpec(name, datatype, (1,), Parameter((name,), kind, target), **more)


def _refused(
    name: str, datatype: str, dims: tuple[int, ...], advice: str, neutral: tuple[object, ...] = ()
) -> InputSpec:
    return InputSpec(name, datatype, dims, Parameter((name,), neutral=neutral, advice=advice))


INPUTS = (
    _scalar("text_input", "BYTES", kinds.TEXT, "prompt", optional=False),
    _refused("decoder_text_input", "BYTES", (1,), "models with an encoder are not served", ("",)),
    _scalar("max_tokens", "INT32", kinds.integer(1, MOST_TOKENS), "max_new_tokens", optional=False),
    _scalar("num_return_sequences", "INT32", _SHARED["n"], "n"),
    InputSpec("bad_words", "BYTES", (-1,), Parameter(("bad_words",), _WORDS, "bad")),
    InputSpec("stop_words", "BYTES", (-1,), Parameter(("stop_words",), _WORDS, "stop")),
    _scalar("exclude_input_in_output", "BOOL", kinds.BOOLEAN, "exclude_prompt"),
    _scalar("end_id", "INT32", kinds.integer(-1, MOST_TOKENS), "end_id"),
    # What fills tensors up. There is nothing to fill in a text.
    _scalar("pad_id", "INT32", kinds.integer(-1, MOST_TOKENS), "pad_id"),
    _scalar("top_k", "INT32", _SHARED["top_k"], "top_k"),
    _scalar("top_p", "FP32", Kind(_TOP_P.expected, _read_top_p), "top_p"),
    _scalar("temperature", "FP32", kinds.number(0), "temperature"),
    _scalar("length_penalty", "FP32", _SHARED["length_penalty"], "length_penalty"),
    _scalar("repetition_penalty", "FP32", _SHARED["repetition_penalty"], "repetition_penalty"),
    _scalar("min_length", "INT32", _SHARED["min_length"], "min_new_tokens"),
    _scalar("presence_penalty", "FP32", _SHARED["presence_penalty"], "presence_penalty"),
    _scalar("frequency_penalty", "FP32", _SHARED["frequency_penalty"], "frequency_penalty"),
    _scalar("random_seed", "UINT64", _SHARED["seed"], "seed"),
    _scalar("return_log_probs", "BOOL", kinds.BOOLEAN, "logprobs"),
    _refused("return_context_logits", "BOOL", (1,), _NO_LOGITS, (False,)),
    _refused("return_generation_logits", "BOOL", (1,), _NO_LOGITS, (False,)),
    _refused("return_perf_metrics", "BOOL", (1,), "GET /metrics has durations and the use of the KV cache", (False,)),
    _scalar("beam_width", "INT32", _SHARED["beam_width"], "beam_width"),
    _scalar("stream", "BOOL", kinds.BOOLEAN, "stream"),
    _refused("prompt_embedding_table", "FP16", (-1, -1), _NO_TABLE, ([],)),
    _refused("prompt_table_extra_id", "UINT64", (1,), _NO_TABLE, (0,)),
    _refused("prompt_vocab_size", "INT32", (1,), _NO_TABLE, (0,)),
    _refused("embedding_bias_words", "BYTES", (-1,), _NO_BIAS, ("", [], [""])),
    _refused("embedding_bias_weights", "FP32", (-1,), _NO_BIAS, ([], [0.0])),
    _scalar("lora_task_id", "UINT64", Kind("the number that an adapter has as its name", _read_task), "adapter"),
    _refused("lora_weights", "FP16", (-1, -1), _NO_WEIGHTS, ([],)),
    _refused("lora_config", "INT32", (-1, 3), _NO_WEIGHTS, ([],)),
    _scalar("guided_decoding_guide_type", "BYTES", kinds.TEXT, "guide_type"),
    _scalar("guided_decoding_guide", "BYTES", kinds.TEXT, "guide_text"),
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
    # Clients of older versions send it.
    Parameter(("return_kv_cache_reuse_stats",), neutral=(False,)),
    # Request parameters, which are no inputs.
    Parameter(("accumulate_tokens",), target=IGNORED),
    Parameter(("sequence_id",), neutral=(0, ""), advice=_NO_SEQUENCES),
    Parameter(("sequence_start",), neutral=(False,), advice=_NO_SEQUENCES),
    Parameter(("sequence_end",), neutral=(False,), advice=_NO_SEQUENCES),
    Parameter(("priority",), neutral=(0,), advice="requests run in the order of their arrival"),
    Parameter(("timeout",), neutral=(0,), advice="set option.predict_timeout"),
    Parameter(("binary_data_output",), kinds.BOOLEAN, "binary_data_output"),
    Parameter(("triton_enable_empty_final_response",), kinds.BOOLEAN, "empty_final_response"),
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


_REQUIRED = {"text_input": "a text that is not empty", "max_tokens": "the number of tokens to generate"}


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One prompt of a request, and what its response shows.

    The response has `n` sequences, with `logprobs` their log-probabilities (otherwise 0), and with `prompt` whole texts
    that begin with the prompt. `stream` is the input of that name, None without it.
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
    for name, expected in _REQUIRED.items():
        if given.get(name) in (None, ""):
            problems.invalid.append(f"'{name}' is required: expected {expected}")
    if values.get("beam_width", 1) > 1:
        values.setdefault("n", values["beam_width"])
    _read_guide(values, problems)
    sampling = read_sampling(values, problems)
    logprobs: bool = values.get("logprobs", False)
    generation = generation_request({"prompt": "", **values}, sampling, logprobs)
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


class OutputSpec(NamedTuple):
    """One output. `dims` have no batch dimension, -1 is any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]


OUTPUTS = (
    OutputSpec("text_output", "BYTES", (-1,)),
    OutputSpec("cum_log_probs", "FP32", (-1,)),
    OutputSpec("output_log_probs", "FP32", (-1, -1)),
    OutputSpec("batch_index", "INT32", (1,)),
    OutputSpec("sequence_index", "INT32", (1,)),
)
"""The outputs of responses. A response has the indices if it is one of several."""

ALWAYS = ("text_output", "cum_log_probs", "output_log_probs")
"""The outputs of a response to a request that names none."""

NOT_PRODUCED = frozenset(
    {
        "context_logits",
        "generation_logits",
        "kv_cache_alloc_new_blocks",
        "kv_cache_alloc_total_blocks",
        "kv_cache_reused_blocks",
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
        "acceptance_rate",
        "total_accepted_draft_tokens",
        "total_draft_tokens",
    }
)
"""Outputs that need inputs which are refused."""


class SequenceOutput(NamedTuple):
    """The text of a sequence, or a part of it, with the log-probabilities of its tokens."""

    text: str
    logprobs: list[float]
    cumulative: float = 0.0


def output_tensors(
    sequences: Sequence[SequenceOutput], generations: Sequence[int], indices: Sequence[int]
) -> dict[str, Tensor]:
    """All outputs by name, of a response with these sequences: those of one prompt after those of another.

    `generations` are the positions of the prompts in the request, `indices` those of each prompt's sequences. Rows of
    log-probabilities that are shorter than others are filled up with 0.
    """
    batch, count = len(generations), len(indices)
    longest = max(len(sequence.logprobs) for sequence in sequences)
    rows = [logprob for each in sequences for logprob in (*each.logprobs, *[0.0] * (longest - len(each.logprobs)))]
    tensors = (
        Tensor("text_output", "BYTES", (len(sequences),), [sequence.text for sequence in sequences]),
        Tensor("cum_log_probs", "FP32", (batch, count), [sequence.cumulative for sequence in sequences]),
        Tensor("output_log_probs", "FP32", (batch, count, longest), rows),
        Tensor("batch_index", "INT32", (batch, 1), list(generations)),
        Tensor("sequence_index", "INT32", (batch, count), [*indices] * batch),
    )
    return {tensor.name: tensor for tensor in tensors}


class BatchEncoder(WholeEncoder):
    """Encodes the one response to the requests of a batch, which has the outputs `wanted`."""

    def __init__(self, requests: Sequence[InferenceRequest], wanted: Iterable[str]) -> None:
        super().__init__(requests[0].n, len(requests))
        self._requests = requests
        self._wanted = tuple(wanted)
        self._prompts: list[str] = []

    def begin(self, prompt: Prompt) -> None:
        self._prompts.append(prompt.text if self._requests[len(self._prompts)].prompt else "")

    def tensors(self) -> dict[str, Tensor]:
        """The outputs, when every sequence has ended.

        Without `logprobs` a log-probability for each token is there and 0, as in Triton. So is one that the engine did
        not report: a tensor has no null.
        """
        n, shown = self._requests[0].n, []
        for index, each in enumerate(self._output.sequences):
            assert each.finished is not None
            request, text = self._requests[index // n], self._prompts[index // n] + each.text
            logprobs = [token.logprob or 0.0 if request.logprobs else 0.0 for token in each.tokens]
            cumulative = each.finished.cumulative_logprob if request.logprobs else None
            shown.append(SequenceOutput(text, logprobs, cumulative or 0.0))
        tensors = output_tensors(shown, range(len(self._requests)), range(n))
        return {name: tensors[name] for name in self._wanted}


_MOST_PROMPTS = 64
_MOST_SEQUENCES = 128
"""The most sequences of all prompts of a request."""
_LARGEST_NEUTRAL = 256
"""Bytes or elements of an input that no engine here has. A larger one is refused before its values are read; a smaller
one may ask for nothing."""
_OUTPUT_NAMES = frozenset(output.name for output in OUTPUTS)
_EXPECTED_OUTPUTS = ", ".join(f"'{output.name}'" for output in OUTPUTS)


def read_batch(
    tensors: Iterable[Tensor], parameters: Mapping[str, Any], model: ModelContext, name: str
) -> list[InferenceRequest]:
    """The requests of all prompts, to which `parameters` apply. `name` is the model's in the request.

    Raises InvalidRequestError.
    """
    given: dict[str, Tensor] = {}
    for tensor in tensors:
        _check_shape(tensor, name)
        if tensor.name in given:
            raise InvalidRequestError(f"input '{tensor.name}' is given twice: expected one tensor of each name")
        given[tensor.name] = tensor
    batch = _batch_size(list(given.values()))
    requests = []
    for row in range(batch):
        problems = Problems()
        values = {each.name: _row(each, row, batch) for each in given.values()}
        requests.append(read_request({**parameters, **values}, model, problems))
        problems.raise_any(f"prompt {row}: " if batch > 1 else "")
    if len({request.n for request in requests}) > 1:
        raise InvalidRequestError("the prompts differ in 'num_return_sequences': expected one number for all of them")
    sequences = sum(request.generation.sampling.sequences for request in requests)
    if sequences > _MOST_SEQUENCES:
        raise InvalidRequestError(f"{sequences} sequences for {batch} prompts: expected at most {_MOST_SEQUENCES}")
    return requests


def check_input(name: Any, model: str, size: int) -> None:
    """Check the name of an input before its values, of `size` bytes or elements, are unpacked.

    An input that is refused anyway may be large, and is not unpacked to find that out. `model` is the name in the
    request. Raises InvalidRequestError.
    """
    described = _BY_NAME.get(name) if type(name) is str else None
    if described is None:
        near = FIELDS.similar(name) if type(name) is str else None
        hint = f", did you mean '{near}'?" if near in _BY_NAME else ""
        raise InvalidRequestError(f"unexpected inference input {show(name)} for model '{model}'{hint}")
    if described.row.target is None and size > _LARGEST_NEUTRAL:
        problems = Problems()
        FIELDS.read({described.name: "a tensor"}, problems, "input")
        problems.raise_any()


def check_outputs(names: Sequence[Any], model: str) -> tuple[str, ...]:
    """The outputs that a request names, or those of one that names none. Raises InvalidRequestError."""
    for name in names:
        if type(name) is str and name in NOT_PRODUCED:
            raise UnsupportedParameterError(f"output '{name}' is not available: expected {_EXPECTED_OUTPUTS}")
        if type(name) is not str or name not in _OUTPUT_NAMES:
            raise InvalidRequestError(f"unexpected inference output {show(name)} for model '{model}'")
    return tuple(dict.fromkeys(names)) or ALWAYS


def _check_shape(tensor: Tensor, model: str) -> None:
    expected, shape = (-1, *_BY_NAME[tensor.name].dims), tensor.shape
    fits = len(shape) == len(expected) and all(
        wanted in (-1, size) for wanted, size in zip(expected, shape, strict=True)
    )
    if not fits:
        raise InvalidRequestError(
            f"unexpected shape for input '{tensor.name}' for model '{model}'. "
            f"Expected {show(list(expected))}, got {show(list(shape))}"
        )


def _batch_size(tensors: list[Tensor]) -> int:
    """The first dimension of every tensor."""
    sizes = {tensor.shape[0]: tensor.name for tensor in tensors}
    if len(sizes) > 1:
        shown = ", ".join(f"{size} in '{name}'" for size, name in sizes.items())
        raise InvalidRequestError(f"input batch sizes differ: {shown}, expected one first dimension of all shapes")
    batch = next(iter(sizes), 1)
    if not 0 < batch <= _MOST_PROMPTS:
        raise InvalidRequestError(f"the batch size is {batch}: expected 1 to {_MOST_PROMPTS}")
    return batch


def _row(tensor: Tensor, row: int, batch: int) -> list[Any]:
    width = len(tensor.data) // batch
    values = tensor.data[row * width : (row + 1) * width]
    if tensor.datatype == "FP32":
        # As their sender wrote them: 0.9 and not 0.8999999761581421, which would sample differently.
        values = [float(f"{value:.7g}") for value in values]
    return values
