"""A dialect of its own, as CONTRIBUTING's recipe makes one: a line of text for each prompt, and one for each output."""

from __future__ import annotations

from collections.abc import Sequence

from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, Prompt, RawRequest, Reply, nearest_row
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotReadyError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnknownModelError,
)
from djl_trtllm.request import GenerationRequest, OutputChunk, Sampling

ERRORS: dict[type[RequestError], int] = {
    InvalidRequestError: 400,
    UnknownModelError: 404,
    MethodNotAllowedError: 405,
    RequestTooLargeError: 413,
    OverloadedError: 429,
    NotReadyError: 503,
    RequestTimeoutError: 504,
    GenerationError: 500,
}


class LinesEncoder:
    """A line for each prompt and its output; as a stream, for each chunk with the number of its prompt."""

    content_type = "text/lines"
    wants_prompt_tokens = False

    def __init__(self, prompts: int, *, stream: bool) -> None:
        self.stream = stream
        self._lines: list[str] = []
        self._outputs = [""] * prompts
        self._running = prompts

    def begin(self, prompt: Prompt) -> None:
        self._lines.append(f"{prompt.text} ({prompt.length}) ->")

    def encode(self, chunk: OutputChunk) -> bytes:
        text = "".join(token.text for token in chunk.tokens)
        if chunk.finished is not None and chunk.finished.error is not None:
            return self.error(chunk.finished.error)
        if self.stream:
            return f"{chunk.generation}{text}\n".encode()
        self._outputs[chunk.generation] += text
        self._running -= chunk.finished is not None
        if self._running:
            return b""
        return "".join(f"{line}{text}\n" for line, text in zip(self._lines, self._outputs, strict=True)).encode()

    def error(self, error: RequestError) -> bytes:
        return f"! {error}\n".encode()


class Trial(Dialect):
    paths = ("/trial", "/trial/{model}/stream")
    pages = ("/trial/models", "/trial/models/{model}")
    actions = ("/trial/count", "/trial/{model}/count")
    names_model = True
    aliases = frozenset({"default"})

    def model_name(self, request: RawRequest) -> str | None:
        return request.properties.get("x-model")

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        lines = [f"{name} {context.options.tgi_compat if context else '-'}\n" for name, _, context, *_ in models]
        return Reply(200, "text/lines", "".join(lines).encode())

    def act(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        if not request.body:
            raise InvalidRequestError("there is nothing to count")
        text = request.body.decode()
        lines = [f"{name} {len(context.tokenizer.encode(text))}\n" for name, _, context, *_ in models if context]
        return Reply(200, "text/lines", "".join(lines).encode())

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        prompts = request.body.decode().splitlines()
        if not prompts:
            raise InvalidRequestError(f"no prompts for {model.name}")
        sampling = Sampling(max_new_tokens=int(request.properties.get("tokens", "4")))
        requests = tuple(GenerationRequest(prompt=prompt, sampling=sampling) for prompt in prompts)
        encoder = LinesEncoder(len(prompts), stream=request.path.endswith("/stream"))
        return Call(requests, encoder, headers=(("X-Prompts", str(len(prompts))),))

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        if not isinstance(error, RequestError):
            return Reply(options.server_error_http_code, "text/plain", b"! defect\n")
        return Reply(nearest_row(ERRORS, error, GenerationError), "text/plain", f"! {error}\n".encode())


TRIAL = Trial()
