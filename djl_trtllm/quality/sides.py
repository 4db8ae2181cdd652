"""The two sides of a comparison: a model that is loaded here, or a running server with OpenAI's API."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import orjson

from djl_trtllm.bench.apis import Body, Prompt, first_model
from djl_trtllm.bench.client import Client, Target, fetch
from djl_trtllm.errors import BenchmarkError, UnsupportedParameterError
from djl_trtllm.offline.llm import OfflineResult, Runner, open_offline_model
from djl_trtllm.quality.figures import Continuation, Position
from djl_trtllm.request import FinishReason, GenerationRequest, RankedToken, Sampling, Token

LIKELIEST = (5, 1)
"""The numbers of log-probabilities to ask for at each position: the second where a side refuses the first."""
_AT_ONCE = 8
_PROBE = Prompt(1, "Hello there")
"""A prompt that finds out what a side gives. One of the user's may fail for reasons of its own."""


class Asked(NamedTuple):
    """The prompts and tokens that both sides are asked for."""

    prompts: Sequence[Prompt]
    tokens: int


class Side(Protocol):
    """One of the two sides; `notes` says what it does not give."""

    name: str
    notes: list[str]

    def answer(self, asked: Asked) -> list[Continuation]:
        """Continue the prompts, greedily, in their order. Raises DjlTrtllmError if it cannot answer at all."""


def open_side(place: str, headers: Mapping[str, str], model: str | None, timeout: float) -> Side:
    """The side that a command line names: the address of a server, else a model as `serve` takes it."""
    if place.startswith(("http://", "https://")):
        return Served(place, Target.parse(place, headers), model, timeout)
    return Loaded(place)


def _ended(text: str, positions: list[Position]) -> list[Position]:
    """The positions of a continuation, with the model's end as the token "": servers have the end token as a text of
    its own, as "" or not at all."""
    if positions and "".join([each.token for each in positions[:-1]]) == text:
        return [*positions[:-1], Position("", positions[-1].logprobs)]
    return [*positions, Position("", {})]


# -- a model that is loaded here ---------------------------------------------------------------------------------------


class Loaded:
    """A model directory, a configuration file in one, an archive or an address, run as an offline batch."""

    def __init__(self, place: str) -> None:
        self.name = place
        self.notes: list[str] = []

    def answer(self, asked: Asked) -> list[Continuation]:
        with closing(Runner(open_offline_model(self.name, {}))) as runner:
            for count in LIKELIEST:
                # `logprobs` alone is the chosen token's.
                ranked = count if count > 1 else 0
                probe, *requests = [
                    _request(each, asked.tokens, logprobs=True, asks_logprobs=True, top_logprobs=ranked)
                    for each in (_PROBE, *asked.prompts)
                ]
                (first,) = runner.run([probe])
                if not isinstance(first.failure, UnsupportedParameterError):
                    break
                self.notes.append(f"the engine gives fewer than {count} likeliest tokens")
            found = [_continuation(result) for result in runner.run(requests)]
            probe, *requests = [
                _request(each, 1, prompt_only=True, prompt_logprobs=LIKELIEST[0]) for each in (_PROBE, *asked.prompts)
            ]
            (first,) = runner.run([probe])
            if first.failure is not None:
                self.notes.append(f"no log-probabilities of prompts: {first.failure}")
                return found
            prompts = [_positions(result.prompt_logprobs or [])[1:] for result in runner.run(requests)]
            return [each._replace(prompt=prompt) for each, prompt in zip(found, prompts, strict=True)]


def _request(prompt: Prompt, tokens: int, **wanted: Any) -> GenerationRequest:
    given: dict[str, Any] = {"prompt": prompt.text}
    if prompt.ids is not None:
        given = {"prompt_ids": prompt.ids}
    elif prompt.messages is not None:
        given = {"messages": prompt.messages}
    return GenerationRequest(**given, **wanted, sampling=Sampling(max_new_tokens=tokens))


def _continuation(result: OfflineResult) -> Continuation:
    if result.failure is not None:
        return Continuation(error=str(result.failure))
    (sequence,) = result.sequences
    positions = _positions(sequence.tokens)
    if sequence.finished is not None and sequence.finished.reason is FinishReason.END_TOKEN:
        positions = _ended(sequence.text, positions)
    return Continuation(positions)


def _positions(tokens: Sequence[Token]) -> list[Position]:
    return [_position(each.text, each.logprob, dict(_likeliest(each))) for each in tokens]


def _likeliest(token: Token) -> list[tuple[str, float]]:
    return [(each.text, each.logprob) for each in token.top] if isinstance(token, RankedToken) else []


def _position(token: str, logprob: float | None, likeliest: Mapping[str, float]) -> Position:
    given = likeliest if logprob is None else {**likeliest, token: logprob}
    # What a server sends may be anything; logarithms of probabilities are no more than 0.
    return Position(token, {text: min(0.0, float(value)) for text, value in given.items()})


# -- a running server --------------------------------------------------------------------------------------------------


class Served:
    """A server with OpenAI's API: `/v1/completions`, and `/v1/chat/completions` for prompts of messages."""

    def __init__(self, name: str, target: Target, model: str | None, timeout: float) -> None:
        self.name = name
        self.notes: list[str] = []
        self._target, self._model, self._timeout = target, model, timeout

    def answer(self, asked: Asked) -> list[Continuation]:
        return asyncio.run(self._answer(asked))

    async def _answer(self, asked: Asked) -> list[Continuation]:
        client = Client(self._target, self._timeout)
        places = asyncio.Semaphore(_AT_ONCE)
        try:
            self._model = self._model or await first_model(client)
            count = await self._accepted(client, asked.prompts)
            echoed = await self._echoed(client, count)

            async def one(prompt: Prompt) -> Continuation:
                async with places:
                    found = await self._ask(client, prompt, asked.tokens, count)
                    if echoed and not found.error and not _is_chat(prompt):
                        found = found._replace(prompt=await self._prompt(client, prompt, echoed))
                    return found

            return list(await asyncio.gather(*map(one, asked.prompts)))
        finally:
            client.close()

    async def _accepted(self, client: Client, prompts: Sequence[Prompt]) -> int:
        """The number of likeliest tokens that the server gives. Raises BenchmarkError if it gives none."""
        only_chat, error = all(map(_is_chat, prompts)), ""
        prompt = Prompt(1, messages=[{"role": "user", "content": _PROBE.text}]) if only_chat else _PROBE
        for count in LIKELIEST:
            error = (await self._ask(client, prompt, 1, count)).error
            if not error:
                return count
            self.notes.append(f"the server gives fewer than {count} likeliest tokens")
        raise BenchmarkError(
            f"{self.name} does not answer a first request with log-probabilities, which name the tokens: {error}"
        )

    async def _echoed(self, client: Client, count: int) -> int:
        """The number of likeliest tokens that the server gives for each token of a prompt; 0 if it gives none."""
        for likeliest in dict.fromkeys((count, 1)):
            if await self._prompt(client, _PROBE, likeliest) is not None:
                return likeliest
        self.notes.append("the server gives no log-probabilities of prompts (echo with logprobs)")
        return 0

    async def _prompt(self, client: Client, prompt: Prompt, count: int) -> Sequence[Position] | None:
        """The tokens of a prompt after the first, with log-probabilities; None if the server gives none."""
        found = (await self._ask(client, prompt, 0, count, echo=True)).positions[1:]
        return found if found and all(each.token in each.logprobs for each in found) else None

    async def _ask(self, client: Client, prompt: Prompt, tokens: int, count: int, **more: bool) -> Continuation:
        body: Body = {"model": self._model, "max_tokens": tokens, "temperature": 0, **more}
        if _is_chat(prompt):
            path, body = "/v1/chat/completions", body | {"messages": prompt.messages, "logprobs": True}
            body |= {"top_logprobs": count} if count > 1 else {}
        else:
            path, body = "/v1/completions", body | {"prompt": prompt.ids or prompt.text, "logprobs": count}
        _, reply, error = await fetch(client, path, orjson.dumps(body))
        if error is not None:
            return Continuation(error=f"{error}: {reply[:300].decode(errors='replace')}".strip(": "))
        try:
            return _read_choice(orjson.loads(reply)["choices"][0])
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            return Continuation(error=f"a response without tokens and log-probabilities: {problem!r}")


def _is_chat(prompt: Prompt) -> bool:
    return prompt.messages is not None and prompt.ids is None


def _read_choice(choice: dict[str, Any]) -> Continuation:
    """A choice of OpenAI's chat completions, or of its completions."""
    logprobs = choice["logprobs"]
    if (content := logprobs.get("content")) is not None:
        text = choice["message"]["content"] or ""
        entries = [
            (each["token"], each["logprob"], {top["token"]: top["logprob"] for top in each.get("top_logprobs") or []})
            for each in content
        ]
    else:
        text, tokens = choice["text"], logprobs["tokens"]
        tops = logprobs.get("top_logprobs") or [{}] * len(tokens)
        entries = list(zip(tokens, logprobs["token_logprobs"], [top or {} for top in tops], strict=True))
    positions = [_position(*entry) for entry in entries]
    return Continuation(_ended(text, positions) if choice.get("finish_reason") == "stop" else positions)
