"""A model that scores pairs on TensorRT-LLM, by `LLM.encode`: see `PoolingExecutor`.

Encoding runs in this process, on one GPU, without ranks, KV cache and scheduler
(`_torch/pyexecutor/encoder_executor.py` of about 1.4). A batch that is too large is a ValueError. What a model takes
beside its ids, such as the places of pairs' second texts, has to be on the GPU, and is refused with CUDA graphs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from djl_trtllm.backends.tensorrt_llm.checkpoints import without_code
from djl_trtllm.backends.tensorrt_llm.executor import class_of
from djl_trtllm.backends.tensorrt_llm.mpi import prepare_mpi
from djl_trtllm.backends.tensorrt_llm.names import build_arguments
from djl_trtllm.executor.pooling import PoolingExecutor, Vectors
from djl_trtllm.executor.protocol import Submit


class TensorRtLlmPoolingExecutor(PoolingExecutor):
    """See `PoolingExecutor`. `arguments` are those of LLM as plain data (see `build_arguments`)."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        **limits: Any,
    ) -> None:
        os.environ.update(environment)
        prepare_mpi()
        version: str = import_module("tensorrt_llm").__version__
        if not arguments.get("trust_remote_code"):
            model = str(without_code(Path(model)))
        llm = class_of("LLM.pytorch", version, "LLM")
        self._llm = llm(model=model, tokenizer=tokenizer, **build_arguments(arguments))
        super().__init__(**limits)
        self.details = {"TensorRT-LLM": version, "backend": "pytorch", "GPUs": 1}

    def compute(self, batch: Sequence[Submit]) -> Vectors:
        import torch

        kinds = torch.tensor([kind for request in batch for kind in _kinds(request)], dtype=torch.int32, device="cuda")
        outputs = self._llm.encode([list(request.prompt_ids) for request in batch], token_type_ids=kinds)
        return np.array([output.logits.tolist() for output in outputs], np.float32).reshape(len(batch), 1)


def _kinds(request: Submit) -> list[int]:
    """A number for each token of a pair: 1 for the tokens of the second text, 0 for the others."""
    length, second = len(request.prompt_ids), 0 if request.pooling is None else request.pooling.second
    return [0] * (second or length) + [1] * (length - (second or length))
