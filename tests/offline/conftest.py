"""Models for offline batches, which leave nothing behind."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from djl_trtllm import LLM
from djl_trtllm.model import Tokenizer
from tests.support.models import scripted_model

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


def offline_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "offline batch"]


@pytest.fixture
def new_processes() -> Processes:
    """What this process has started since the test began; other tests' servers may live beside it."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: set(psutil.Process().children(recursive=True)) - before


@pytest.fixture
def nothing_left(new_processes: Processes) -> Iterator[None]:
    """No process and no thread of a test outlives it."""
    threads = len(offline_threads())
    yield
    assert not new_processes()
    assert len(offline_threads()) <= threads


@pytest.fixture
def make(tmp_path: Path, nothing_left: None) -> Iterator[Make]:
    """`make(script, file=..., **options)`: a scripted model, `file` in its serving.properties; closed at the end."""
    with ExitStack() as stack:

        def make_one(
            script: dict[str, object] | None = None, file: dict[str, object] | None = None, **options: object
        ) -> LLM:
            return stack.enter_context(LLM(scripted_model(tmp_path / "model", script, **(file or {})), **options))

        yield make_one
