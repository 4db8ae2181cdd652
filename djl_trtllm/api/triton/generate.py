"""`generate` and `generate_stream`: inputs and request parameters in one JSON object, outputs in another.

The members of a response are in alphabetical order; a tensor of one element is a scalar, any other is flat. Source:
`http_server.cc` of Triton (e1db8a6) and its `extension_generate.md`.
"""

from __future__ import annotations

from typing import Any

import orjson

from djl_trtllm.api.base import Call, ModelContext, Prompt, RawRequest, ResponseEncoder
from djl_trtllm.api.output import WholeEncoder, dump_line
from djl_trtllm.api.parameters import Problems
from djl_trtllm.api.triton.content import read_body, read_id, read_object, read_parameters
from djl_trtllm.api.triton.description import VERSION, is_decoupled
from djl_trtllm.api.triton.inputs import STREAM_NEEDS_DECOUPLED, InferenceRequest, read_request
from djl_trtllm.api.triton.outputs import output_tensors, sequence_output
from djl_trtllm.errors import InvalidRequestError, RequestError
from djl_trtllm.request import OutputChunk, Token

SEQUENCE_PARAMETERS = {"sequence_end": False, "sequence_id": 0, "sequence_start": False}
"""What an ensemble adds to every response."""

_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
_SSE = "text/event-stream; charset=utf-8"


def parse_generate(request: RawRequest, model: ModelContext, name: str) -> Call:
    """Read a body. `name` is the model's in the path. Raises InvalidRequestError."""
    streams = request.path.endswith("/generate_stream")
    if streams and not is_decoupled(model):
        raise InvalidRequestError(STREAM_NEEDS_DECOUPLED)
    payload = read_object(read_body(request, model.options.max_request_size))
    values = read_parameters(payload) | payload
    values.pop("parameters", None)
    values.pop("id", None)
    problems = Problems.of(model.options)
    read = read_request(values, model, problems)
    if not streams and read.stream:
        problems.invalid.append(_ONE_RESPONSE)
    if streams and read.stream is not False and read.generation.sampling.beam_width > 1:
        problems.invalid.append("'beam_width' is above 1: expected 1 in a stream, or 'stream' to be false")
    problems.raise_any()
    head = {"model_name": name, "model_version": VERSION, **SEQUENCE_PARAMETERS}
    if identifier := read_id(payload):
        head["id"] = identifier
    encoder: ResponseEncoder
    if streams and read.stream is not False:
        encoder = GenerateStreamEncoder(read, head)
    else:
        encoder = GenerateEncoder(read, head, as_event=streams)
    return Call((read.generation,), encoder, problems.headers)


class GenerateEncoder(WholeEncoder):
    """One object at the end; `as_event`: as the only event of a stream."""

    def __init__(self, request: InferenceRequest, head: dict[str, Any], *, as_event: bool = False) -> None:
        super().__init__(request.n)
        self.stream = as_event
        self.content_type = _SSE if as_event else "application/json"
        self._request = request
        self._head = head
        self._prompt = ""

    def begin(self, prompt: Prompt) -> None:
        if self._request.prompt:
            self._prompt = prompt.text

    def _body(self) -> bytes:
        body = self._object()
        return b"data: " + dump_line(body) + b"\n\n" if self.stream else orjson.dumps(body)

    def _object(self) -> dict[str, Any]:
        sequences = []
        for each in self._output.sequences:
            assert each.finished is not None
            sequences.append(
                sequence_output(
                    self._prompt + each.text,
                    each.tokens,
                    logprobs=self._request.logprobs,
                    cumulative=each.finished.cumulative_logprob,
                )
            )
        outputs = {tensor.name: _unwrapped(tensor.data) for tensor in output_tensors(sequences)}
        return dict(sorted((self._head | outputs).items()))


class GenerateStreamEncoder:
    """An event for each chunk, with its new text and the log-probabilities of its tokens. There is no last event."""

    stream = True
    content_type = _SSE
    wants_prompt_tokens = False

    def __init__(self, request: InferenceRequest, head: dict[str, Any]) -> None:
        self._logprobs = request.logprobs
        self._cumulative = [0.0] * request.n
        self._begun = [False] * request.n
        self._failed = False
        self._templates = [_template(head, index if request.n > 1 else None) for index in range(request.n)]

    def begin(self, prompt: Prompt) -> None:
        """The prompt is not part of a stream."""

    def encode(self, chunk: OutputChunk) -> bytes:
        if self._failed:
            return b""
        finished = chunk.finished
        if finished is None:
            return self._event(chunk.index, chunk.tokens)
        # The end by itself is no event: one without a token is sent only if there was none before.
        data = self._event(chunk.index, chunk.tokens) if chunk.tokens or not self._begun[chunk.index] else b""
        return data if finished.error is None else data + self.error(finished.error)

    def error(self, error: RequestError) -> bytes:
        """A last event with Triton's `error`."""
        self._failed = True
        return b"data: " + dump_line({"error": str(error)}) + b"\n\n"

    def _event(self, index: int, tokens: list[Token]) -> bytes:
        self._begun[index] = True
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        if not self._logprobs:
            shown = b"0.0" if len(tokens) == 1 else orjson.dumps([0.0] * len(tokens))
            return self._templates[index] % (b"0.0", shown, dump_line(text))
        logprobs = [token.logprob or 0.0 for token in tokens]
        self._cumulative[index] += sum(logprobs)
        return self._templates[index] % (
            orjson.dumps(self._cumulative[index]),
            orjson.dumps(_unwrapped(logprobs)),
            dump_line(text),
        )


def _unwrapped(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _template(head: dict[str, Any], index: int | None) -> bytes:
    """An event with places for `cum_log_probs`, `output_log_probs` and `text_output`."""
    members: dict[str, bytes] = {name: dump_line(value).replace(b"%", b"%%") for name, value in head.items()}
    if index is not None:
        members["sequence_index"] = b"%d" % index
    members |= dict.fromkeys(("cum_log_probs", "output_log_probs", "text_output"), b"%b")
    return b"data: {" + b",".join(b'"%b":%b' % (name.encode(), members[name]) for name in sorted(members)) + b"}\n\n"
