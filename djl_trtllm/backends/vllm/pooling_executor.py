"""A model that embeds or scores on vLLM's engine core, with its pooling runner: see `PoolingExecutor`.

vLLM's pooler picks the tokens that count, without its activation, which the server applies.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from djl_trtllm.backends.vllm.executor import described, load_engine, token_prompt
from djl_trtllm.executor.pooling import PoolingExecutor, Vectors
from djl_trtllm.executor.protocol import Submit

_TASKS = {"embed": "embed", "score": "classify"}


class VllmPoolingExecutor(PoolingExecutor):
    """See `PoolingExecutor`. `arguments` are those of EngineArgs, as plain data."""

    def __init__(
        self, *, arguments: dict[str, Any], environment: Mapping[str, str], task: Any, max_seq_len: int, **limits: Any
    ) -> None:
        engine, self.check = load_engine(arguments, environment)
        from vllm import PoolingParams

        self._core, self._input_processor = engine.engine_core, engine.input_processor
        self._parameters = PoolingParams
        self._task = _TASKS[task]
        self._names = map(str, itertools.count())
        longest = min(max_seq_len, engine.vllm_config.model_config.max_model_len)
        super().__init__(task=task, max_seq_len=longest, **limits)
        self.details = described(engine)

    def compute(self, batch: Sequence[Submit]) -> Vectors:
        names = [self._add(request) for request in batch]
        found: dict[str, Vectors] = {}
        while len(found) < len(names):
            for output in self._core.get_output().outputs:
                if output.pooling_output is None:
                    raise RuntimeError(f"vLLM ended a text with {output.finish_reason!s} and gave no vector")
                found[output.request_id] = output.pooling_output.float().numpy().reshape(-1)
        return np.stack([found[name] for name in names])

    def _add(self, request: Submit) -> str:
        """Give a request to the core; returns its name there."""
        name, second = next(self._names), 0 if request.pooling is None else request.pooling.second
        kinds = {"compressed_token_type_ids": second} if second else None
        parameters = self._parameters(task=self._task, use_activation=False, extra_kwargs=kinds)
        self._core.add_request(
            self._input_processor.process_inputs(name, token_prompt(request), parameters, (self._task,))
        )
        return name
