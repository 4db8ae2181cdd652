"""A package of entry points, installed for the processes that get its environment, and a dialect for one.

The dialect is as CONTRIBUTING's recipe makes it: a line of text for each prompt, and one for each output.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from djl_trtllm.api.base import (
    Call,
    Dialect,
    ModelContext,
    ModelStatus,
    Prompt,
    RawRequest,
    Reply,
    ResponseEncoder,
    error_headers,
)
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    InvalidRequestError,
    RequestError,
)
from djl_trtllm.request import GenerationRequest, OutputChunk, Sampling


def installed(folder: Path, group: str, *points: str) -> dict[str, str]:
    """Write the metadata of a package with these entry points; returns the variable that lets Python find it."""
    metadata = folder / "trial_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trial-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join((f"[{group}]", *points)))
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{folder}{os.pathsep}{root}"}


# -- A dialect of its own, as CONTRIBUTING's recipe makes one: a line of text for each prompt, and one for each output


class LinesEncoder(ResponseEncoder):
    """A line for each prompt and its output; as a stream, for each chunk with the number of its prompt."""

    content_type = "text/lines"

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
        """A line of text, with the statuses that every dialect has."""
        message = str(error) if isinstance(error, RequestError) else "defect"
        return Reply(self.status(error, options), "text/plain", f"! {message}\n".encode(), error_headers(error))


TRIAL = Trial()
