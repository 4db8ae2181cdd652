"""Prompts of a load: synthetic ones of a given length, lengths as conversations have them, or those of a file."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from djl_trtllm.errors import BenchmarkError

TOKENS_PER_WORD = 1.3
"""Where the server does not say: that of English with usual vocabularies."""
_TEXT = (
    "the of and to in is was that for on are with as his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some her "
    "would other into has more two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)
WORDS = _TEXT.split()
SHAREGPT_MEANS = 217.4, 185.6
"""Prompt and output tokens."""
_LONGEST = 1024
_SIGMA = 1.3, 1.1


class Prompt(NamedTuple):
    """A prompt, as text or as chat messages, and how many tokens to generate at most."""

    output_tokens: int
    text: str = ""
    messages: list[dict[str, Any]] | None = None

    def plain(self) -> str:
        """For APIs without chat: the texts of the messages."""
        if self.messages is None:
            return self.text
        return "\n".join(str(message.get("content", "")) for message in self.messages)


def sample_text(words: int = 400) -> str:
    """Words as in the synthetic prompts, to count their tokens."""
    return " ".join(WORDS[index % len(WORDS)] for index in range(words))


def synthetic(chance: random.Random, tokens: int, output: int, per_word: float) -> Iterator[Prompt]:
    """Prompts of about `tokens` tokens. They are random from the first word, so that none reuses another's KV cache."""
    while True:
        yield Prompt(output, _text(chance, tokens, per_word))


def like_sharegpt(chance: random.Random, per_word: float) -> Iterator[Prompt]:
    """Synthetic prompts with log-normal lengths of prompt and output, whose means are those of ShareGPT's turns.

    The means are those of 1,000 prompts that vLLM's benchmark samples from ShareGPT V3; the words are random.
    """
    while True:
        prompt, output = (_length(chance, mean, sigma) for mean, sigma in zip(SHAREGPT_MEANS, _SIGMA, strict=True))
        yield Prompt(output, _text(chance, prompt, per_word))


def of_file(path: Path, output: int, chance: random.Random) -> Iterator[Prompt]:
    """The prompts of a JSONL file in random order, again and again. Raises BenchmarkError for lines that are wrong.

    A line has `prompt`, `inputs` or `messages`, and may have `max_tokens`.
    """
    prompts = _read(path, output)
    while True:
        chance.shuffle(prompts)
        yield from prompts


def _text(chance: random.Random, tokens: int, per_word: float) -> str:
    return " ".join(chance.choices(WORDS, k=max(1, round(tokens / per_word))))


def _length(chance: random.Random, mean: float, sigma: float) -> int:
    # Cut lengths have a smaller mean: these medians make up for it (tests hold the means).
    median = mean * math.exp(-(sigma**2) / 2) * (1 + sigma**4 / 13)
    return max(4, min(_LONGEST, round(chance.lognormvariate(math.log(median), sigma))))


def _read(path: Path, output: int) -> list[Prompt]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchmarkError(f"--dataset {path}: cannot read it: {error.strerror}") from None
    prompts = [_prompt(line, f"{path}:{number}", output) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BenchmarkError(f"--dataset {path}: no prompts; expected a JSON object on each line")
    return prompts


def _prompt(line: bytes, where: str, output: int) -> Prompt:
    try:
        item = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BenchmarkError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    item = item if isinstance(item, dict) else {}
    text, messages = item.get("prompt", item.get("inputs")), item.get("messages")
    length = item.get("max_tokens", output)
    if type(length) is not int or length < 1:
        raise BenchmarkError(f"{where}: max_tokens is {length!r}; expected a whole number, at least 1")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return Prompt(length, messages=messages)
    if isinstance(text, str) and text:
        return Prompt(length, text)
    raise BenchmarkError(f"{where}: expected an object with 'prompt' or 'inputs' (text), or 'messages' (a list)")
