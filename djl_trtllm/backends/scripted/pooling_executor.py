"""The scripted executor for models that embed or score: what a text becomes follows from its token ids."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from djl_trtllm.executor.pooling import PoolingExecutor, Vectors
from djl_trtllm.executor.protocol import Submit


class PoolingScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The behaviour of the executor.

    An iteration takes `step_seconds`. A text with the token `fatal_token` ends the process.
    """

    dimensions: int = 8
    step_seconds: float = 0
    fatal_token: int | None = None


class ScriptedPoolingExecutor(PoolingExecutor):
    """See `PoolingExecutor`. `script` has the members of `PoolingScript`."""

    def __init__(self, *, script: dict[str, Any], **limits: Any) -> None:
        self._script = msgspec.convert(script, PoolingScript)
        self._dimensions = 1 if limits["task"] == "score" else self._script.dimensions
        super().__init__(activates=True, dimensions=self._dimensions, **limits)

    def compute(self, batch: Sequence[Submit]) -> Vectors:
        time.sleep(self._script.step_seconds)
        if any(self._script.fatal_token in request.prompt_ids for request in batch):
            os.kill(os.getpid(), signal.SIGKILL)
        return np.stack([vector_of(request.prompt_ids, self._dimensions) for request in batch])


def vector_of(ids: Sequence[int], dimensions: int) -> Vectors:
    """Return the vector of a text with these ids, before it is normalised."""
    weights = np.outer(np.arange(1, dimensions + 1), np.arange(1, len(ids) + 1))
    return np.asarray(np.cos(weights * np.asarray(ids)).sum(axis=1), np.float32)
