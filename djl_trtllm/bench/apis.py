"""The APIs that a load can be put on: where requests go, what they say, and how their streams are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from djl_trtllm.bench.client import Client, clock, fetch
from djl_trtllm.bench.prompts import Prompt
from djl_trtllm.bench.streams import EventReader, Reader, Stream, TokenReader
from djl_trtllm.errors import BenchmarkError

Body = dict[str, Any]
_PROBE_TOKENS = 4


class Api(NamedTuple):
    """`extras` are asked for first, and left out one after another if the server refuses them."""

    path: str
    body: Callable[[Prompt, str], Body]
    reader: Callable[[Stream], Reader]
    extras: tuple[tuple[str, Body], ...] = ()
    parameters: str | None = None
    """The field that holds the parameters; None: they stand beside the prompt."""
    needs_model: bool = False


def _lmi(prompt: Prompt, model: str) -> Body:
    parameters = {"max_new_tokens": prompt.output_tokens}
    if prompt.messages is not None:
        return {"messages": prompt.messages, "max_tokens": prompt.output_tokens, "stream": True, "parameters": {}}
    return {"inputs": prompt.text, "parameters": parameters, "stream": True}


def _chat(prompt: Prompt, model: str) -> Body:
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    return {"model": model, "messages": messages, "max_tokens": prompt.output_tokens, "stream": True}


def _completions(prompt: Prompt, model: str) -> Body:
    return {"model": model, "prompt": prompt.plain(), "max_tokens": prompt.output_tokens, "stream": True}


def _tgi(prompt: Prompt, model: str) -> Body:
    return {"inputs": prompt.plain(), "parameters": {"max_new_tokens": prompt.output_tokens}}


def _triton(prompt: Prompt, model: str) -> Body:
    return {"text_input": prompt.plain(), "max_tokens": prompt.output_tokens, "stream": True}


_USAGE: tuple[tuple[str, Body], ...] = (
    ("usage in each event", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("usage at the end", {"stream_options": {"include_usage": True}}),
)
_IGNORE = "output of the requested length"

APIS: Mapping[str, Api] = {
    "chat": Api("/v1/chat/completions", _chat, EventReader, ((_IGNORE, {"ignore_eos": True}), *_USAGE), None, True),
    "completions": Api(
        "/v1/completions", _completions, EventReader, ((_IGNORE, {"ignore_eos": True}), *_USAGE), None, True
    ),
    "lmi": Api("/invocations", _lmi, TokenReader, ((_IGNORE, {"ignore_eos_token": True}),), "parameters"),
    "tgi": Api("/generate_stream", _tgi, TokenReader, ((_IGNORE, {"ignore_eos": True}),), "parameters"),
    "triton": Api("/v2/models/{model}/generate_stream", _triton, EventReader, ((_IGNORE, {"end_id": -1}),)),
}
"""By the name that `--api` takes."""


class Requests:
    """Makes the requests of one API, with the extras that the server accepts."""

    def __init__(self, client: Client, api: str, model: str | None, parameters: Body, *, ignore_end: bool) -> None:
        self.name = api
        self.api = APIS[api]
        self.client = client
        self.model = model or ("ensemble" if api == "triton" else "")
        self.notes: list[str] = []
        self._parameters = parameters
        self._extras = [(what, extra) for what, extra in self.api.extras if ignore_end or what != _IGNORE]

    @property
    def ignores_end(self) -> bool:
        """Whether the output has the requested length."""
        return any(what == _IGNORE for what, _ in self._extras)

    @property
    def _path(self) -> str:
        return self.api.path.format(model=quote(self.model, safe=""))

    def make(self, prompt: Prompt) -> bytes:
        body = self.api.body(prompt, self.model)
        field = self.api.parameters
        # Of the extras for the usage the first is enough.
        extra: Body = {}
        for _, each in reversed(self._extras):
            extra |= each
        extra |= self._parameters
        if field is None or "messages" in body:
            body.pop(field or "", None)
            body |= extra
        else:
            body[field] |= extra
        return self.client.target.request(self._path, orjson.dumps(body))

    def reader(self, prompt: Prompt, intended: float) -> Reader:
        """Of the stream that answers a prompt."""
        # LMI answers chat messages as OpenAI's events.
        kind = EventReader if self.name == "lmi" and prompt.messages is not None else self.api.reader
        # Where the server reports no number of tokens it is the requested one, if outputs have that length.
        return kind(Stream(intended, prompt.output_tokens if self.ignores_end else 0))

    async def prepare(self, prompts: Iterator[Prompt]) -> None:
        """Find the model and the extras that the server accepts with small requests.

        Raises BenchmarkError if it answers none of them.
        """
        if self.api.needs_model and not self.model:
            self.model = await self._first_model()
        prompt = next(prompts)._replace(output_tokens=_PROBE_TOKENS)
        while True:
            reader = self.reader(prompt, clock())
            stream = reader.stream
            status = await self.client.send(self.make(prompt), reader)
            if stream.error is None:
                return
            if status not in (400, 422, 424) or not self._extras:
                raise BenchmarkError(self._refusal(stream))
            what, _ = self._extras.pop(0)
            self.notes.append(f"the server refuses to be asked for {what}")

    def _refusal(self, stream: Stream) -> str:
        target = self.client.target
        where = f"{target.host}:{target.port}{target.path(self._path)}"
        advice = ""
        if "404" in str(stream.error):
            advice = f"; --api is one of {', '.join(APIS)}, --model the name of a model of this server"
        elif "401" in str(stream.error) or "403" in str(stream.error):
            advice = "; give a key with --api-key or BENCH_API_KEY"
        text = f": {stream.detail.strip()}" if stream.detail else ""
        return f"{where} does not answer a first request: {stream.error}{text}{advice}"

    async def _first_model(self) -> str:
        status, body, _ = await fetch(self.client, "/v1/models")
        try:
            return str(orjson.loads(body)["data"][0]["id"]) if status == 200 else ""
        except (orjson.JSONDecodeError, LookupError, TypeError):
            return ""


async def tokens_per_word(client: Client, text: str) -> float | None:
    """By the server's own tokenizer, if it has `POST /tokenize` as this server and vLLM do."""
    status, body, _ = await fetch(client, "/tokenize", orjson.dumps({"prompt": text}))
    try:
        return float(orjson.loads(body)["count"]) / len(text.split()) if status == 200 else None
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
        return None
