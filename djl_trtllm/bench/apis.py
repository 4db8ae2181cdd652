"""The APIs that a load can be put on: where requests go, what they say, and how their streams are read."""

import codecs
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from djl_trtllm.bench.client import Client, EventReader, Reader, Stream, TokenReader, clock, fetch
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.files import read_file

# -- prompts -----------------------------------------------------------------------------------------------------------

TOKENS_PER_WORD = 1.3
"""Tokens per word of English with usual vocabularies, for a server that does not say its own."""
_TEXT = (
    "the of and to in is was that for on are with as his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some her "
    "would other into has more two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)
WORDS = _TEXT.split()
_MOST_PROMPT_TOKENS = 1 << 20


class Prompt(NamedTuple):
    """A prompt, as text, as chat messages or as token ids, and how many tokens to generate at most.

    `tokens` is the length of a prompt of which only the length is known. `parameters` are those of its request alone.
    """

    output_tokens: int
    text: str = ""
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    tokens: int = 0
    parameters: dict[str, Any] | None = None

    def plain(self) -> str:
        """The prompt for APIs without chat: its text, or the texts of its messages."""
        if self.messages is None:
            return self.text
        return "\n".join(str(message.get("content", "")) for message in self.messages)


def sample_text(words: int = 400) -> str:
    """Return words as in the synthetic prompts, whose tokens a server counts."""
    return " ".join(WORDS[index % len(WORDS)] for index in range(words))


def synthetic(chance: random.Random, tokens: int, output: int, per_word: float) -> Iterator[Prompt]:
    """Prompts of about `tokens` tokens. They are random from the first word, so that none reuses another's KV cache."""
    while True:
        yield Prompt(output, _text(chance, tokens, per_word))


def of_file(path: Path, output: int, chance: random.Random, per_word: float = TOKENS_PER_WORD) -> Iterator[Prompt]:
    """The prompts of a JSONL file (see `read_prompts`) in random order, without end.

    Prompts of which only the length is known get random words.
    """
    prompts = read_prompts(path, output, "--dataset")
    while True:
        chance.shuffle(prompts)
        for prompt in prompts:
            yield prompt._replace(text=_text(chance, prompt.tokens, per_word)) if prompt.tokens else prompt


def _text(chance: random.Random, tokens: int, per_word: float) -> str:
    return " ".join(chance.choices(WORDS, k=max(1, round(tokens / per_word))))


MOST_PROMPTS_BYTES = 1 << 28
"""The most bytes of a file of prompts."""


def read_prompts(path: Path, output: int, flag: str) -> list[Prompt]:
    """The prompts of a file that the server recorded, or of another one of JSON lines.

    A line has `prompt`, `inputs`, `messages`, `prompt_ids` or `prompt_tokens` (a number), and may have `max_tokens` and
    `parameters`. Raises BenchmarkError for lines that are wrong; `flag` names the file.
    """
    try:
        lines = read_file(path, MOST_PROMPTS_BYTES).removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise BenchmarkError(f"{flag} {path}: cannot read it: {error.strerror}") from None
    prompts = [_prompt(line, f"{path}:{number}", output) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BenchmarkError(f"{flag} {path}: no prompts; expected a JSON object on each line")
    return prompts


def _prompt(line: bytes, where: str, output: int) -> Prompt:
    try:
        item = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BenchmarkError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    item = item if isinstance(item, dict) else {}
    text, messages, ids = item.get("prompt", item.get("inputs")), item.get("messages"), item.get("prompt_ids")
    length, tokens, parameters = item.get("max_tokens", output), item.get("prompt_tokens"), item.get("parameters", {})
    if type(length) is not int or length < 1:
        raise BenchmarkError(f"{where}: max_tokens is {length!r}; expected a whole number, at least 1")
    if not isinstance(parameters, dict):
        raise BenchmarkError(f"{where}: parameters is {parameters!r:.80}; expected an object")
    found = Prompt(length, parameters=parameters or None)
    if isinstance(ids, list) and ids and all(type(each) is int and each >= 0 for each in ids):
        found = found._replace(ids=ids)
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return found._replace(messages=messages)
    if isinstance(text, str) and text:
        return found._replace(text=text)
    if found.ids is None and type(tokens) is int and 0 < tokens <= _MOST_PROMPT_TOKENS:
        return found._replace(tokens=tokens)
    if found.ids is None:
        raise BenchmarkError(
            f"{where}: expected an object with 'prompt' or 'inputs' (text), 'messages' (a list), 'prompt_ids' (a list "
            f"of whole numbers) or 'prompt_tokens' (a whole number, up to {_MOST_PROMPT_TOKENS:,})"
        )
    return found


Body = dict[str, Any]
_PROBE_TOKENS = 4


class Api(NamedTuple):
    """How requests of an API are written and its responses read.

    `extras` are asked for first, and left out one after another if the server refuses them.
    """

    path: str
    prompt: str
    """The field of the prompt's text; `messages`: chat messages."""
    length: str
    """The field of the number of tokens to generate."""
    reader: Callable[[Stream], Reader]
    extras: tuple[tuple[str, Body], ...] = ()
    parameters: str | None = None
    """The field that holds the length and the parameters; None: they stand beside the prompt."""
    has_switch: bool = True
    """Whether a field `stream` asks for a stream; without it the route does."""
    needs_model: bool = False


_USAGE: tuple[tuple[str, Body], ...] = (
    ("usage in each event", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("usage at the end", {"stream_options": {"include_usage": True}}),
)
_IGNORE = "output of the requested length"
_OPENAI = ((_IGNORE, {"ignore_eos": True}), *_USAGE)

APIS: Mapping[str, Api] = {
    "chat": Api("/v1/chat/completions", "messages", "max_tokens", EventReader, _OPENAI, needs_model=True),
    "completions": Api("/v1/completions", "prompt", "max_tokens", EventReader, _OPENAI, needs_model=True),
    "lmi": Api(
        "/invocations", "inputs", "max_new_tokens", TokenReader, ((_IGNORE, {"ignore_eos_token": True}),), "parameters"
    ),
    "tgi": Api(
        "/generate_stream",
        "inputs",
        "max_new_tokens",
        TokenReader,
        ((_IGNORE, {"ignore_eos": True}),),
        "parameters",
        has_switch=False,
    ),
    "triton": Api(
        "/v2/models/{model}/generate_stream", "text_input", "max_tokens", EventReader, ((_IGNORE, {"end_id": -1}),)
    ),
}
"""The APIs by the name that `--api` takes."""
_LMI_CHAT = APIS["lmi"]._replace(prompt="messages", length="max_tokens", reader=EventReader, parameters=None)
"""LMI answers chat messages as OpenAI's events."""


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
        """Return whether the output has the requested length."""
        return any(what == _IGNORE for what, _ in self._extras)

    @property
    def _path(self) -> str:
        return self.api.path.format(model=quote(self.model, safe=""))

    def _api(self, prompt: Prompt) -> Api:
        return _LMI_CHAT if self.name == "lmi" and prompt.messages is not None else self.api

    def make(self, prompt: Prompt) -> bytes:
        api = self._api(prompt)
        parameters: Body = {api.length: prompt.output_tokens}
        # Of the extras for the usage the first is enough.
        for _, extra in reversed(self._extras):
            parameters |= extra
        parameters |= (prompt.parameters or {}) | self._parameters
        if prompt.ids is not None and api.prompt == "prompt":
            text: Any = prompt.ids
        elif prompt.ids is not None and not prompt.plain():
            raise BenchmarkError(f"the prompts are token ids, which --api {self.name} does not take: --api completions")
        elif api.prompt == "messages":
            text = prompt.messages or [{"role": "user", "content": prompt.text}]
        else:
            text = prompt.plain()
        body: Body = {"model": self.model} if api.needs_model else {}
        body |= {api.prompt: text} | ({"stream": True} if api.has_switch else {})
        body |= parameters if api.parameters is None else {api.parameters: parameters}
        return self.client.target.request(self._path, orjson.dumps(body))

    def reader(self, prompt: Prompt, intended: float) -> Reader:
        """Return the reader of the stream that answers a prompt."""
        # Where the server reports no number of tokens it is the requested one, if outputs have that length.
        return self._api(prompt).reader(Stream(intended, prompt.output_tokens if self.ignores_end else 0))

    async def prepare(self, prompts: Iterator[Prompt]) -> None:
        """Find the model and the extras that the server accepts with small requests.

        Raises BenchmarkError if it answers none of them.
        """
        if self.api.needs_model and not self.model:
            self.model = await first_model(self.client)
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


async def first_model(client: Client) -> str:
    """Return the name of the first model of `/v1/models`; "" if the server has no such page."""
    status, body, _ = await fetch(client, "/v1/models")
    try:
        return str(orjson.loads(body)["data"][0]["id"]) if status == 200 else ""
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return ""


async def tokens_per_word(client: Client, text: str) -> float | None:
    """Return the tokens per word by the server's own tokenizer; None without `POST /tokenize`, which vLLM has too."""
    status, body, _ = await fetch(client, "/tokenize", orjson.dumps({"prompt": text}))
    try:
        return float(orjson.loads(body)["count"]) / len(text.split()) if status == 200 else None
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
        return None
