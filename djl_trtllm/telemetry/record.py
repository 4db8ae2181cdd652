"""A sampled log of requests, as lines of JSON that `djl-trtllm bench` and `djl-trtllm quality` replay.

A request is chosen when it begins and written when it has ended, by a thread. Prompts are written only as far as
`record_prompts` allows: ids are text for everybody who has the tokenizer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import sys
import time
from functools import partial
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Any

import orjson

from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.config import Options
from djl_trtllm.engines.cache import installed_versions
from djl_trtllm.errors import ConfigError
from djl_trtllm.logs import BackgroundHandler
from djl_trtllm.request import FINISH_WORDS, GenerationRequest, Sampling
from djl_trtllm.version import __version__

if TYPE_CHECKING:
    from djl_trtllm.telemetry.reports import ServedRequest

logger = logging.getLogger(__name__)

_ENGINES = ("openvino-genai", "tensorrt-llm", "vllm")
_MOST_WAITING = 256
"""Entries that wait for the disk, each with its prompt; more are dropped and counted in the log."""
_NEUTRAL = Sampling()


class _Lines(RotatingFileHandler):
    """Writes entries to a file, which only its owner may read if it is new; a full one becomes `FILE.1`.

    An entry that is larger than the file may be loses its prompt.
    """

    _said = False

    def _open(self) -> io.TextIOWrapper:
        # Lines are UTF-8 in characters of Latin-1: rotation counts characters, and the bound is one of bytes.
        private = partial(os.open, mode=0o600)
        return open(self.baseFilename, "a", encoding="latin-1", opener=private)

    def format(self, record: logging.LogRecord) -> str:
        head, prompt = record.entry  # type: ignore[attr-defined]
        line = orjson.dumps(head | prompt, default=list)  # prompts are arrays
        return (line if len(line) < self.maxBytes else orjson.dumps(head)).decode("latin-1")

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "entry"):
            super().emit(record)
        else:
            logger.warning("%s: %s", self.baseFilename, record.getMessage())

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:  # the thread that writes goes on, and so may later entries
            self._say_once()

    def handleError(self, record: logging.LogRecord) -> None:
        self._say_once()

    def _say_once(self) -> None:
        if not self._said:
            self._said = True
            text = "%s: requests could not be recorded, which is said once: %s"
            logger.warning(text, self.baseFilename, sys.exc_info()[1])


class Recorder:
    """Chooses requests and records them. Raises ConfigError for a file that cannot be written."""

    def __init__(self, options: Options, chance: random.Random | None = None) -> None:
        assert options.record_file is not None
        self._share, self._prompts = options.record_share, options.record_prompts
        self._chance = chance or random.Random()  # noqa: S311  # which requests are recorded is no secret
        self._versions = {"djl-trtllm": __version__, **installed_versions(_ENGINES)}
        try:
            lines = _Lines(options.record_file, maxBytes=options.record_max_bytes, backupCount=1)
        except OSError as error:
            raise ConfigError(
                f"record_file={options.record_file}: cannot write it: {error.strerror}; name a file in a folder "
                "that this process may write to, or unset it"
            ) from None
        self._lines, self._file = BackgroundHandler(lines, _MOST_WAITING), lines

    def chooses(self) -> bool:
        """Whether the next request is one that is recorded."""
        return self._chance.random() < self._share

    def write(self, served: ServedRequest) -> None:
        """Record a chosen request that has ended, with an entry for each of its prompts that was queued.

        Nothing replays texts that become vectors: those are not recorded.
        """
        for request, state in zip(served.recorded, served.generations, strict=False):
            if request.pooling is not None:
                continue
            entry = self._head(served, request, state), self._prompt(request, state)
            record = logger.makeRecord(logger.name, logging.INFO, "", 0, "", (), None, extra={"entry": entry})
            self._lines.handle(record)

    def close(self) -> None:
        """Write what waits."""
        self._lines.close()
        with contextlib.suppress(OSError):  # a full disk, which has been said
            self._file.close()

    def _head(self, served: ServedRequest, request: GenerationRequest, state: RequestState) -> dict[str, Any]:
        record, sequences, sampling = state.record, state.sequences, request.sampling
        set_fields = {
            name: value
            for name in Sampling.__struct_fields__
            if (value := getattr(sampling, name)) != getattr(_NEUTRAL, name) and name != "max_new_tokens"
        }
        return {
            "time": time.time(),
            "id": served.id,
            "model": served.model,
            "dialect": served.dialect,
            "versions": self._versions,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.generated_tokens,
            "max_tokens": max(1, *(len(sequence.token_ids) for sequence in sequences)),
            "finish_reason": None if record.reason is None else FINISH_WORDS[record.reason],
            "parameters": {"do_sample": sampling.do_sample, **set_fields}
            | ({} if sequences[0].seed is None else {"seed": sequences[0].seed})
            | ({} if request.adapter is None else {"adapters": request.adapter}),
        }

    def _prompt(self, request: GenerationRequest, state: RequestState) -> dict[str, Any]:
        if self._prompts == "lengths":
            return {}
        found: dict[str, Any] = {"prompt_ids": state.sequences[0].prompt_ids}
        if self._prompts == "text":
            texts = {"prompt": request.prompt, "messages": request.messages}
            found |= {name: value for name, value in texts.items() if value}
        return found
