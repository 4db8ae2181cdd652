"""`LLM.encode` of about 1.3.0rc18 (#12801): one forward step of a batch, on the caller's thread."""

from __future__ import annotations

from typing import Any

import torch

from .build import positions
from .results import EncoderOutput

ENCODERS = ("BertForSequenceClassification",)
"""Architectures that encode, of `_torch/models/_arch_index.py` (about 1.4)."""


class Encoder:
    """A score is a hundredth of the sum of the ids, and the place where the second text begins.

    The model of a text without kinds of tokens takes all of them as those of a first text.
    """

    def __init__(self, config: dict[str, Any], args: Any) -> None:
        (architecture,) = config["architectures"]
        if architecture not in ENCODERS:
            raise ValueError(f"Unknown architecture for AutoModelForCausalLM: {architecture}")
        if args.worker_count > 1:
            raise NotImplementedError("encoding on several GPUs is not played")
        self._labels = len(config.get("id2label", "ab"))
        self._args = args
        self._longest = min(args.max_seq_len or positions(config), positions(config))

    def encode(self, inputs: list[list[int]], model_kwargs: dict[str, Any]) -> list[EncoderOutput]:
        lengths = [len(ids) for ids in inputs]
        for what, value, most in (
            ("Batch size", len(inputs), self._args.max_batch_size),
            ("Total tokens", sum(lengths), self._args.max_num_tokens),
            ("Max sequence length", max(lengths), self._longest),
        ):
            if value > most:
                raise ValueError(f"{what} ({value}) exceeds {most}.")
        if model_kwargs and self._args.cuda_graph_config is not None:
            raise NotImplementedError(
                "LLM.encode(..., **model_kwargs) is not supported when encoder CUDA graphs are enabled. Disable "
                f"encoder CUDA graphs or omit model_kwargs. Unsupported keys: {sorted(model_kwargs)}"
            )
        kinds = model_kwargs.get("token_type_ids")
        if kinds is None:
            kinds = torch.tensor([0] * sum(lengths), dtype=torch.int32, device="cuda")
        if kinds.device != "cuda":
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")
        assert len(kinds) == sum(lengths), "Shapes are not the same!"
        outputs, begin = [], 0
        for ids in inputs:
            own, begin = kinds[begin : begin + len(ids)], begin + len(ids)
            score = sum(ids) / 100 + (own.index(1) if 1 in own else 0)
            outputs.append(EncoderOutput(torch.tensor([score] * self._labels), ids))
        return outputs
