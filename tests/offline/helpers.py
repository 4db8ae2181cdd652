"""Prompts, and what the scripted executor makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import psutil

from djl_trtllm import LLM
from djl_trtllm.model import Tokenizer

Make = Callable[..., LLM]
"""`make(script, file=..., **options)`: a scripted model, `file` in its serving.properties; closed at the end."""

Processes = Callable[[], set[psutil.Process]]
"""What this process has started since the test began; other tests' servers may live beside it."""

PROMPT = "Once upon a time, in a dark wood,"


def stories(count: int) -> list[str]:
    return [f"this is the story number {number} of the wolf" for number in range(count)]


def repeated(tokenizer: Tokenizer, prompt: str, tokens: int) -> list[int]:
    """What the scripted executor generates."""
    return list(itertools.islice(itertools.cycle(tokenizer.encode(prompt)), tokens))
