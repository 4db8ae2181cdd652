"""A model that embeds or scores on vLLM's engine core, with its pooling runner: see `PoolingExecutor`.

vLLM's pooler picks the tokens that count, without its activation, which the server applies.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from djl_trtllm.backends.vllm.executor import RANKS, described, load_engine, token_prompt
from djl_trtllm.executor.pooling import PoolingExecutor, Vectors
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.executor.ranks import Ranks
from djl_trtllm.request import Pooling, Sampling

_TASKS = {"embed": "embed", "score": "classify"}
_FIRST = Submit(0, [1, 1], Sampling(1), pooling=Pooling())


class VllmPoolingExecutor(PoolingExecutor):
    """See `PoolingExecutor`. `arguments` are those of EngineArgs, as plain data."""

    def __init__(
        self, *, arguments: dict[str, Any], environment: Mapping[str, str], task: Any, max_seq_len: int, **limits: Any
    ) -> None:
        self._ranks = Ranks(*RANKS)
        engine = load_engine(arguments, environment, self._ranks)
        from vllm import PoolingParams

        self._core, self._input_processor = engine.engine_core, engine.input_processor
        self._parameters = PoolingParams
        self._task = _TASKS[task]
        self._names = map(str, itertools.count())
        dimensions = self.compute([_FIRST]).shape[1]
        longest = min(max_seq_len, engine.vllm_config.model_config.max_model_len)
        super().__init__(task=task, dimensions=dimensions, max_seq_len=longest, **limits)
        self.details = described(engine)

    def check(self) -> None:
        """Raise if a rank has ended, see `VllmExecutor.check`."""
        self._ranks.check()

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
        parameters = self._parameters(
            task=self._task,
            use_activation=False,
            extra_kwargs={"compressed_token_type_ids": second} if second else None,
        )
        self._core.add_request(
            self._input_processor.process_inputs(name, token_prompt(request), parameters, (self._task,))
        )
        return name
