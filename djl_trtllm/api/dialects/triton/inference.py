"""The inputs and outputs of Triton's TensorRT-LLM models, and reading the requests of a batch of prompts.

Sources: `ensemble/config.pbtxt` and `tensorrt_llm_bls/config.pbtxt` of tensorrtllm_backend v0.19 (34 and 6 more
inputs) and of TensorRT-LLM 2a9abd9 (4 more), `llmapi/tensorrt_llm` of TensorRT-LLM 0a71057 and 0df60f9, and what
their models write: `text_output` has an element for each sequence and no batch dimension. Where values come from (JSON,
tensors over HTTP, tensors over gRPC) makes no difference.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from msgspec.structs import replace

from djl_trtllm.api import parameters as kinds
from djl_trtllm.api.base import ModelContext, Prompt, WholeEncoder
from djl_trtllm.api.dialects.triton.tensors import Tensor
from djl_trtllm.api.parameters import IGNORED, Kind, Parameter, Problems, Table, read_words, show
from djl_trtllm.api.sampling import ADAPTER, GUIDES, MOST_TOKENS, SAMPLING, generation_request, read_sampling
from djl_trtllm.config.options.choices import TritonModel
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.request import FINISH_WORDS, FinishReason, GenerationRequest, Guide, OutputChunk, SequenceResult

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
    """Read `top_p`: in Triton, 0 and less mean that it is not set."""
    if type(value) in (int, float) and -1 <= value <= 0:
        return 1.0
    top_p: float = _TOP_P.read(value)
    return top_p


def _read_task(value: Any) -> str:
    return str(kinds.integer(0, 2**64 - 1).read(value))


_WORDS = Kind('a string or a list of strings ("" means none)', read_words)
_NO_LOGITS = "logits stay in the engine; 'return_log_probs' gives the log-probabilities of the tokens"
_NO_BIAS = "no engine here has biases of tokens; use 'bad_words'"
_NO_PERF_METRICS = "GET /metrics has durations and the use of the KV cache"
_NO_COUNTS = "'usage' in /v1/completions has the numbers of tokens"
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


_SEED = Parameter(("random_seed", "seed"), _SHARED["seed"], "seed")
_MIN_TOKENS = Parameter(("min_length", "min_tokens"), _SHARED["min_length"], "min_new_tokens")

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
    InputSpec("min_length", "INT32", (1,), _MIN_TOKENS),
    InputSpec("min_tokens", "INT32", (1,), _MIN_TOKENS),
    _scalar("presence_penalty", "FP32", _SHARED["presence_penalty"], "presence_penalty"),
    _scalar("frequency_penalty", "FP32", _SHARED["frequency_penalty"], "frequency_penalty"),
    InputSpec("random_seed", "UINT64", (1,), _SEED),
    InputSpec("seed", "UINT64", (1,), _SEED),
    _scalar("return_log_probs", "BOOL", kinds.BOOLEAN, "logprobs"),
    _refused("return_context_logits", "BOOL", (1,), _NO_LOGITS, (False,)),
    _refused("return_generation_logits", "BOOL", (1,), _NO_LOGITS, (False,)),
    _refused("return_perf_metrics", "BOOL", (1,), _NO_PERF_METRICS, (False,)),
    _refused("return_num_input_tokens", "BOOL", (1,), _NO_COUNTS, (False,)),
    _refused("return_num_output_tokens", "BOOL", (1,), _NO_COUNTS, (False,)),
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
"""The inputs of `ensemble`, in the order of its configuration. The older one has `random_seed` and `min_length`."""

BLS_INPUTS = (
    _refused("image_input", "FP16", (-1, 3, -1, -1), _NO_TABLE, ([],)),
    _refused("image_bytes_input", "UINT8", (-1, -1, -1, -1), _NO_TABLE, ([],)),
    _refused("image_url_input", "BYTES", (1,), _NO_TABLE, ("",)),
    _refused("video_bytes_input", "UINT8", (-1, -1, -1, -1), _NO_TABLE, ([],)),
    _refused("num_draft_tokens", "INT32", (1,), "a draft model is an option of the server", (0,)),
    _refused("use_draft_logits", "BOOL", (1,), "a draft model is an option of the server", (False,)),
)
"""Further inputs of `tensorrt_llm_bls`."""

_MAX_TOKENS = Parameter(("sampling_param_max_tokens", "max_tokens"), kinds.integer(1, MOST_TOKENS), "max_new_tokens")
_NO_PROCESSORS = "code of one's own does not run in the engine here"
_NO_LORA_FILES = "register the adapter with the server, under its 'lora_name'"

LLM_API_INPUTS = (
    InputSpec("text_input", "BYTES", (-1,), Parameter(("text_input",), kinds.TEXT, "prompt"), optional=False),
    _refused("image_url", "BYTES", (-1,), "chats of OpenAI's API take images", ("", [])),
    _scalar("streaming", "BOOL", kinds.BOOLEAN, "stream"),
    *(
        _scalar(f"sampling_param_{name}", datatype, kind, target)
        for name, datatype, kind, target in (
            ("best_of", "INT32", _SHARED["best_of"], "best_of"),
            ("temperature", "FP32", kinds.number(0), "temperature"),
            ("top_k", "INT32", _SHARED["top_k"], "top_k"),
            ("top_p", "FP32", _SHARED["top_p"], "top_p"),
            ("frequency_penalty", "FP32", _SHARED["frequency_penalty"], "frequency_penalty"),
            ("presence_penalty", "FP32", _SHARED["presence_penalty"], "presence_penalty"),
        )
    ),
    # `docs/llmapi.md` of tensorrtllm_backend has the shorter name, which Triton itself does not read.
    InputSpec("sampling_param_max_tokens", "INT32", (1,), _MAX_TOKENS),
    InputSpec("sampling_param_stop", "BYTES", (-1,), Parameter(("sampling_param_stop",), _WORDS, "stop")),
    _scalar("sampling_param_seed", "UINT64", _SHARED["seed"], "seed"),
    _scalar("sampling_param_exclude_input_from_output", "BOOL", kinds.BOOLEAN, "exclude_prompt"),
    _refused("sampling_param_return_perf_metrics", "BOOL", (1,), _NO_PERF_METRICS, (False,)),
    _refused("sampling_param_logits_post_processor_name", "BYTES", (1,), _NO_PROCESSORS, ("",)),
    _scalar("return_finish_reason", "BOOL", kinds.BOOLEAN, "finish_reason"),
    _scalar("return_stop_reason", "BOOL", kinds.BOOLEAN, "stop_reason"),
    _scalar("return_cumulative_logprob", "BOOL", kinds.BOOLEAN, "cumulative_logprob"),
    _refused("stop", "BOOL", (1,), "a request ends when its client closes the connection", (False,)),
    _scalar("lora_id", "UINT64", kinds.integer(0, 2**64 - 1), IGNORED),
    _scalar("lora_name", "BYTES", kinds.TEXT, "adapter"),
    _refused("lora_path", "BYTES", (1,), _NO_LORA_FILES, ("",)),
    _refused("lora_ckpt_source", "BYTES", (1,), _NO_LORA_FILES, ("hf", "nemo")),
)
"""The inputs of the LLM API's `tensorrt_llm`, in the order of its configuration."""

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

_EXPECTED = {"text_input": "a text that is not empty", "max_tokens": "the number of tokens to generate"}
"""A description of the value that each required input expects."""


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
    """The request with `end_id` in place of the model's own end token, as in TensorRT-LLM; -1: with no end token."""
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

LLM_API_OUTPUTS = (
    OutputSpec("text_output", "BYTES", (-1,)),
    OutputSpec("finish_reason", "BYTES", (-1,)),
    OutputSpec("stop_reason", "BYTES", (-1,)),
    OutputSpec("cumulative_logprob", "FP32", (-1,)),
)
"""The outputs of the LLM API's model: the text, and what the inputs `return_...` ask for."""

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
        "num_input_tokens",
        "num_output_tokens",
        "kv_cache_reused_block",
        "kv_cache_missed_block",
        "kv_cache_hit_rate",
    }
)
"""Outputs that need inputs which are refused."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One prompt of a request, and what its response shows.

    The response has `n` sequences, with `logprobs` their log-probabilities (otherwise 0), and with `prompt` whole texts
    that begin with the prompt. `stream` is the input of that name, None without it. `usual` are the outputs of a
    response to a request that names none.
    """

    generation: GenerationRequest
    n: int
    logprobs: bool
    prompt: bool
    stream: bool | None
    empty_final_response: bool = False
    binary_data_output: bool = False
    usual: tuple[str, ...] = ALWAYS


_MOST_PROMPTS = 64
_MOST_SEQUENCES = 128
"""The most sequences of all prompts of a request."""
_LARGEST_NEUTRAL = 256
"""Bytes or elements of an input that no engine here has. A larger one is refused before its values are read; a smaller
one may ask for nothing."""
_LLM_API_TOKENS = 32
"""`max_tokens` of TensorRT-LLM's `SamplingParams` by default."""
_ASKED_FOR = ("finish_reason", "stop_reason", "cumulative_logprob")
"""Outputs that inputs of the LLM API's model ask for."""


@dataclass(frozen=True, eq=False)
class Interface:
    """The inputs and outputs of a model of Triton.

    `always` are the outputs of a response to a request that names none, `added` the parameters of every response.
    Tensors of a `batched` model have the number of prompts as their first dimension, before the `dims` of their input.
    Others have one prompt, no stream unless it is asked for, and the text so far in each response of a stream.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    always: tuple[str, ...]
    added: Mapping[str, object]
    batched: bool

    @cached_property
    def by_name(self) -> dict[str, InputSpec]:
        return {each.name: each for each in self.inputs}

    @cached_property
    def fields(self) -> Table:
        """Inputs and request parameters, which `generate` has in one object."""
        return Table([each.row for each in self.inputs], ADAPTER, _PARAMETERS)

    def schema(self) -> dict[str, Any]:
        """Describes the body of `generate`: any input may be in a list, and request parameters in `parameters`."""
        schema = self.fields.schema()
        inputs = {name: {"anyOf": [each, {"type": "array"}]} for name, each in schema["properties"].items()}
        return schema | {"properties": {**inputs, "id": {}, "parameters": {}}}

    def read_request(self, given: Mapping[str, Any], model: ModelContext, problems: Problems) -> InferenceRequest:
        """Read inputs and request parameters by name: a scalar as it is or in a list.

        Adds what is wrong to `problems`.
        """
        unwrapped = self._unwrapped(given, problems)
        values = self.fields.read(unwrapped, problems, "input")
        for each in self.inputs:
            if not each.optional and unwrapped.get(each.name, given.get(each.name)) in (None, ""):
                problems.invalid.append(f"'{each.name}' is required: expected {_EXPECTED[each.name]}")
        if given.get("lora_id") is not None and "adapter" not in values:
            problems.invalid.append("'lora_id' is given without 'lora_name': expected the adapter's name")
        if values.get("beam_width", 1) > 1:
            values.setdefault("n", values["beam_width"])
        if not self.batched:
            values.setdefault("max_new_tokens", _LLM_API_TOKENS)
        _read_guide(values, problems)
        sampling = read_sampling(values, problems)
        asked = [name for name in _ASKED_FOR if values.get(name)]
        logprobs: bool = values.get("logprobs", "cumulative_logprob" in asked)
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
            values.get("stream", None if self.batched else False),
            values.get("empty_final_response", False),
            values.get("binary_data_output", False),
            (*self.always, *asked),
        )

    def _unwrapped(self, given: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
        """The values; the list around a scalar is removed."""
        found: dict[str, Any] = {}
        for name, value in given.items():
            described = self.by_name.get(name)
            if described is not None and (described.dims == (1,) or name in _EXPECTED) and type(value) is list:
                if len(value) != 1:
                    problems.invalid.append(f"'{name}' has {len(value)} values: expected one")
                    continue
                value = value[0]
            found[name] = value
        return found

    def read_batch(
        self, tensors: Iterable[Tensor], parameters: Mapping[str, Any], model: ModelContext, name: str
    ) -> list[InferenceRequest]:
        """The requests of all prompts, to which `parameters` apply. `name` is the model's in the request.

        Raises InvalidRequestError.
        """
        given: dict[str, Tensor] = {}
        for tensor in tensors:
            if tensor.name in given:
                raise InvalidRequestError(f"input '{tensor.name}' is given twice: expected one tensor of each name")
            given[tensor.name] = self._of_a_batch(tensor, name)
        batch = _batch_size(list(given.values()))
        requests = []
        for row in range(batch):
            problems = Problems()
            values = {each.name: _row(each, row, batch) for each in given.values()}
            requests.append(self.read_request({**parameters, **values}, model, problems))
            problems.raise_any(f"prompt {row}: " if batch > 1 else "")
        if len({request.n for request in requests}) > 1:
            raise InvalidRequestError(
                "the prompts differ in 'num_return_sequences': expected one number for all of them"
            )
        sequences = sum(request.generation.sampling.sequences for request in requests)
        if sequences > _MOST_SEQUENCES:
            raise InvalidRequestError(f"{sequences} sequences for {batch} prompts: expected at most {_MOST_SEQUENCES}")
        return requests

    def check_input(self, name: Any, model: str, size: int) -> None:
        """Check the name of an input before its values, of `size` bytes or elements, are unpacked.

        An input that is refused anyway may be large, and is not unpacked to find that out. `model` is the name in the
        request. Raises InvalidRequestError.
        """
        described = self.by_name.get(name) if type(name) is str else None
        if described is None:
            near = self.fields.similar(name) if type(name) is str else None
            hint = f", did you mean '{near}'?" if near in self.by_name else ""
            raise InvalidRequestError(f"unexpected inference input {show(name)} for model '{model}'{hint}")
        if described.row.target is None and size > _LARGEST_NEUTRAL:
            problems = Problems()
            self.fields.read({described.name: "a tensor"}, problems, "input")
            problems.raise_any()

    def check_outputs(self, names: Sequence[Any], model: str, usual: tuple[str, ...]) -> tuple[str, ...]:
        """The outputs that a request names, or the `usual` ones of one that names none. Raises InvalidRequestError."""
        known = [output.name for output in self.outputs]
        quoted = ", ".join(f"'{name}'" for name in known)
        for name in names:
            if type(name) is str and name in NOT_PRODUCED:
                raise UnsupportedParameterError(f"output '{name}' is not available: expected {quoted}")
            if type(name) is not str or name not in known:
                raise InvalidRequestError(f"unexpected inference output {show(name)} for model '{model}'")
        return tuple(dict.fromkeys(names)) or usual

    def _of_a_batch(self, tensor: Tensor, model: str) -> Tensor:
        """The tensor with a batch dimension. Raises InvalidRequestError for a shape that does not fit."""
        dims, shape = self.by_name[tensor.name].dims, tensor.shape
        expected = (-1, *dims) if self.batched else dims
        fits = len(shape) == len(expected) and all(
            wanted in (-1, size) for wanted, size in zip(expected, shape, strict=True)
        )
        if not fits:
            raise InvalidRequestError(
                f"unexpected shape for input '{tensor.name}' for model '{model}'. "
                f"Expected {show(list(expected))}, got {show(list(shape))}"
            )
        return tensor if self.batched else tensor._replace(shape=(1, *shape))


_OF_SEQUENCES = {"sequence_end": False, "sequence_id": 0, "sequence_start": False}
ENSEMBLE = Interface((*INPUTS, *BLS_INPUTS), OUTPUTS, ALWAYS, _OF_SEQUENCES, batched=True)
LLM_API = Interface(LLM_API_INPUTS, LLM_API_OUTPUTS, ("text_output",), {}, batched=False)


def interface_of(model: ModelContext) -> Interface:
    """The interface that the clients of a model use."""
    return LLM_API if model.options.triton_model == TritonModel.LLMAPI else ENSEMBLE


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


class SequenceOutput(NamedTuple):
    """The text of a sequence, or a part of it, with the log-probabilities of its tokens, and why it has ended."""

    text: str
    logprobs: list[float]
    cumulative: float = 0.0
    finish_reason: str = ""
    stop_reason: str = ""


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


def reason_tensors(sequences: Sequence[SequenceOutput]) -> dict[str, Tensor]:
    """Further outputs of the LLM API's model by name."""
    tensors = (
        Tensor("finish_reason", "BYTES", (len(sequences),), [sequence.finish_reason for sequence in sequences]),
        Tensor("stop_reason", "BYTES", (len(sequences),), [sequence.stop_reason for sequence in sequences]),
        Tensor("cumulative_logprob", "FP32", (len(sequences),), [sequence.cumulative for sequence in sequences]),
    )
    return {tensor.name: tensor for tensor in tensors}


def _reasons(finished: SequenceResult | None) -> tuple[str, str]:
    """`finish_reason` and `stop_reason` as TensorRT-LLM's `CompletionOutput` has them, as text."""
    if finished is None:
        return "None", "None"
    ended = finished.reason in (FinishReason.END_TOKEN, FinishReason.STOP)
    return "stop" if ended else FINISH_WORDS[finished.reason], str(finished.stop_sequence)


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

        Without `logprobs` each token has the log-probability 0, as in Triton, and so has a token without one from the
        engine: a tensor has no null.
        """
        n, shown = self._requests[0].n, []
        for index, each in enumerate(self._output.sequences):
            assert each.finished is not None
            request, text = self._requests[index // n], self._prompts[index // n] + each.text
            logprobs = [token.logprob or 0.0 if request.logprobs else 0.0 for token in each.tokens]
            cumulative = each.finished.cumulative_logprob if request.logprobs else None
            shown.append(SequenceOutput(text, logprobs, cumulative or 0.0, *_reasons(each.finished)))
        tensors = output_tensors(shown, range(len(self._requests)), range(n)) | reason_tensors(shown)
        return {name: tensors[name] for name in self._wanted}


class TextSoFar:
    """The outputs of a stream of the LLM API's model: after each chunk all text so far."""

    def __init__(self, request: InferenceRequest, wanted: Iterable[str]) -> None:
        self._request = request
        self._wanted = tuple(wanted)
        self._text = ""
        self._cumulative = 0.0

    def begin(self, prompt: Prompt) -> None:
        self._text = prompt.text if self._request.prompt else ""

    def after(self, chunk: OutputChunk) -> dict[str, Tensor]:
        """The outputs after a chunk."""
        self._text += "".join([token.text for token in chunk.tokens])
        if self._request.logprobs:
            self._cumulative += sum(token.logprob or 0.0 for token in chunk.tokens)
        output = SequenceOutput(self._text, [], self._cumulative, *_reasons(chunk.finished))
        tensors = output_tensors([output], (0,), (0,)) | reason_tensors([output])
        return {name: tensors[name] for name in self._wanted}
