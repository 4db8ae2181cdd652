"""TGI's API: `/generate`, `/generate_stream`, and `POST /`, which is either."""

import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from djl_trtllm import errors
from djl_trtllm.api import base, parameters as kinds, texts
from djl_trtllm.api.base import dump_line
from djl_trtllm.api.families import HuggingFaceLike, hugging_face_error
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import IGNORED, Parameter, Problems, Table, check_text, read_object, show
from djl_trtllm.api.sampling import ADAPTER, NOT_HONOURED, SAMPLING, generation_request, read_sampling
from djl_trtllm.api.texts import Presentation, TextEncoder, TokenStreamEncoder, tgi_token
from djl_trtllm.request import FINISH_WORDS, SequenceResult, Token
from djl_trtllm.version import __version__

# Source: `generate_internal` in `router/src/server.rs` of TGI (003eaec). Its `x-compute-type` is the name of the
# machine and is left out.


Headers = tuple[tuple[str, str], ...]


def stream_headers(characters: int) -> Headers:
    """The headers of a stream, which is not timed when it begins. The second one stops nginx from collecting events."""
    return (("x-compute-characters", str(characters)), ("x-accel-buffering", "no"))


class Timing:
    """Times one request, from the moment it is made. `characters` are those of its prompt."""

    def __init__(self, characters: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._characters = characters
        self._arrived = clock()
        self._prompt_tokens = 0
        self._validation = 0.0

    def tokenised(self, prompt_tokens: int) -> None:
        """The prompt is checked and in the queue."""
        self._prompt_tokens = prompt_tokens
        self._validation = self._clock() - self._arrived

    def headers(self, best: SequenceResult) -> Headers:
        """The headers when all sequences have ended; tokens are counted in the best one, as TGI does."""
        total = self._clock() - self._arrived
        inference = max(0.0, total - self._validation - best.queue_seconds)
        return (
            ("x-compute-time", f"{total:.6f}"),
            ("x-compute-characters", str(self._characters)),
            ("x-total-time", _milliseconds(total)),
            ("x-validation-time", _milliseconds(self._validation)),
            ("x-queue-time", _milliseconds(best.queue_seconds)),
            ("x-inference-time", _milliseconds(inference)),
            ("x-time-per-token", _milliseconds(inference / max(1, best.generated_tokens))),
            ("x-prompt-tokens", str(self._prompt_tokens)),
            ("x-generated-tokens", str(best.generated_tokens)),
        )


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


class GenerateEncoder(TextEncoder):
    """`{"generated_text", "details"?}`."""

    def __init__(self, presentation: Presentation, timing: Timing, *, as_list: bool = False) -> None:
        super().__init__(presentation, as_list=as_list)
        self._timing = timing

    def begin(self, prompt: base.Prompt) -> None:
        super().begin(prompt)
        self._timing.tokenised(prompt.length)

    def headers(self) -> Headers:
        """The headers of the response, when it is complete."""
        finished = self._output.sequences[0].finished
        assert finished is not None
        return self._timing.headers(finished)

    def details(self, sequence: base.CollectedSequence) -> dict[str, Any]:
        assert sequence.finished is not None
        prompt = self._presentation.prompt_tokens
        return {
            **_end(sequence.finished),
            "prefill": [{"id": token.id, "text": token.text, "logprob": None} for token in prompt],
            "tokens": [tgi_token(token) for token in sequence.tokens],
        }


class GenerateStreamEncoder(TokenStreamEncoder):
    """Events `{"index", "token", "generated_text", "details"}`; the last has the whole text, and details if wanted."""

    content_type = "text/event-stream"

    def line(self, token: Token) -> bytes:
        self._texts.append(token.text)
        self._last_id = token.id
        return b'data:{"index":%d,"token":%b,"generated_text":null,"details":null}\n\n' % (
            len(self._texts),
            dump_line(tgi_token(token)),
        )

    def error(self, error: errors.RequestError) -> bytes:
        """A last event with TGI's `error` and `error_type`, which its clients raise."""
        return b"data:" + dump_line(hugging_face_error(str(error), error)) + b"\n\n"

    def end(self, token: Token, finished: SequenceResult) -> bytes:
        length = self._presentation.prompt_length
        details = {**_end(finished), "input_length": length} if self._presentation.details else None
        event = {"index": len(self._texts), "token": tgi_token(token), "generated_text": self._text, "details": details}
        return b"data:" + dump_line(event) + b"\n\n"


def _end(finished: SequenceResult) -> dict[str, Any]:
    return {
        "finish_reason": FINISH_WORDS[finished.reason],
        "generated_tokens": finished.generated_tokens,
        "seed": finished.seed,
    }


_DEFAULT_NEW_TOKENS = 100

PARAMETERS = Table(
    SAMPLING,
    ADAPTER,
    NOT_HONOURED,
    texts.PARAMETERS,
    elsewhere=dict.fromkeys(("inputs", "stream"), "beside 'parameters', not in it"),
)
"""`parameters`."""

FIELDS = Table(
    (
        Parameter(("inputs",), kinds.PROMPT, "inputs"),
        Parameter(("parameters",), PARAMETERS.kind, IGNORED),
        Parameter(("stream",), kinds.BOOLEAN, "stream"),
        Parameter(("model",), target=IGNORED),
        # Clients of Hugging Face's hosted inference API send it to every server.
        Parameter(("options",), target=IGNORED),
    ),
    elsewhere=dict.fromkeys(("max_new_tokens", "temperature", "do_sample", "details"), "in 'parameters'")
    | {"messages": "to /v1/chat/completions"},
    required=("inputs",),
)
"""The body."""


class Tgi(HuggingFaceLike):
    """`/generate`, `/generate_stream`, and `POST /`, which is either; `/info` and `/health`.

    Sources: `router/src/lib.rs`, `server.rs` and `infer/mod.rs` of TGI (db931fc). A request samples if `do_sample` is
    true, or if `temperature`, `top_k` or `top_p` asks for it. `best_of` generates as many sequences and returns them
    all, the best first.
    """

    title = "Text Generation Inference (TGI)"
    paths = ("/generate", "/generate_stream", "/")
    pages = ("/info", "/health")
    health = frozenset({"/health"})
    statuses = MappingProxyType({**HuggingFaceLike.statuses, errors.RequestTimeoutError: 500})
    tables = dict.fromkeys(paths, (FIELDS,))
    descriptions = read_operations("tgi.toml")

    def page(self, request: base.RawRequest, models: Sequence[base.ModelStatus]) -> base.Reply:
        """`/health` is 200 with an empty body when every model is ready; `/info` describes the only model."""
        if request.path == "/health":
            if models and all(model.ready for model in models):
                return base.Reply(200, "text/plain", b"")
            return base.Reply.json({"error": "unhealthy", "error_type": "healthcheck"}, 503)
        if len(models) != 1:
            names = ", ".join(model.name for model in models) or "none"
            raise errors.UnknownModelError(f"/info describes the only model; loaded: {names}", name=None)
        model, _ = base.only_model(models)
        options = model.options
        return base.Reply.json(
            {
                "model_id": model.name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": options.job_queue_size,
                "max_best_of": 16,
                "max_stop_sequences": 64,
                "max_input_tokens": options.max_input_len,
                "max_total_tokens": model.max_seq_len,
                "router": "djl-trtllm",
                "version": __version__,
            }
        )

    def parse(self, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        """See `Dialect`. On `/generate_stream` the response is a stream, on `/` if `stream` says so."""
        payload, problems = read_object(request, "inputs"), Problems.of(model.options)
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
        shown = Presentation(
            # As TGI: the tokens of the prompt have their place in the details.
            details=values.get("details", False) or values.get("prefill", False) or sampling.n > 1,
            return_full_text=values.get("return_full_text", False),
            prefill=values.get("prefill", False),
            n=sampling.n,
        )
        generation = generation_request(values, sampling, stream or shown.details, prompt=inputs)
        if stream:
            return base.Call(
                (generation,), GenerateStreamEncoder(shown), (*problems.headers, *stream_headers(len(inputs)))
            )
        encoder = GenerateEncoder(shown, Timing(len(inputs)), as_list=request.path == "/")
        return base.Call((generation,), encoder, problems.headers, encoder.headers)


TGI = Tgi()
