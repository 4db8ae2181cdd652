"""A model that embeds or scores, run by OpenVINO itself: OpenVINO GenAI's pipelines take a batch and return with its
last text, so that no text could join a running batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from djl_trtllm.backends.openvino.compile import MODEL_XML
from djl_trtllm.executor.pooling import PoolingExecutor, Vectors
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model.pooling import Pooled

_LENGTHS = 8
"""Prompts are padded to multiples of this number of tokens: OpenVINO prepares each shape once."""


class OpenVinoPoolingExecutor(PoolingExecutor):
    """See `PoolingExecutor`. `pooled` is a value of `Pooled`."""

    def __init__(
        self,
        *,
        engine_dir: str,
        pooled: str,
        pad_id: int,
        inference_precision: str,
        num_threads: int | None = None,
        **limits: Any,
    ) -> None:
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": inference_precision,
            "PERFORMANCE_HINT": "LATENCY",  # one iteration has all threads
        }
        if num_threads is not None:
            properties["INFERENCE_NUM_THREADS"] = num_threads
        model = ov.Core().compile_model(Path(engine_dir) / MODEL_XML, "CPU", properties)
        size = model.output(0).partial_shape[-1]
        super().__init__(dimensions=0 if size.is_dynamic else size.get_length(), **limits)
        self._inputs = {each.get_any_name() for each in model.inputs}
        self._request = model.create_infer_request()
        self._pooled = Pooled(pooled)
        self._pad_id = pad_id
        self.details = {"OpenVINO": ov.get_version(), "inference": inference_precision}

    def padded(self, tokens: int) -> int:
        return min(-(-tokens // _LENGTHS) * _LENGTHS, self.limits.max_seq_len)

    def compute(self, batch: Sequence[Submit]) -> Vectors:
        lengths = np.array([len(request.prompt_ids) for request in batch])
        shape = len(batch), self.padded(int(lengths.max()))
        ids = np.full(shape, self._pad_id, np.int64)
        types = np.zeros(shape, np.int64)
        for row, request in enumerate(batch):
            ids[row, : lengths[row]] = request.prompt_ids
            if request.pooling is not None and request.pooling.second:
                types[row, request.pooling.second : lengths[row]] = 1
        places = np.arange(shape[1])
        mask = (places < lengths[:, None]).astype(np.int64)
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        if "position_ids" in self._inputs:
            given["position_ids"] = np.broadcast_to(places, shape).copy()
        self._request.infer({name: given[name] for name in given if name in self._inputs}, share_inputs=True)
        output: Vectors = self._request.get_output_tensor(0).data
        if self.limits.task == "score":
            return output.reshape(len(batch), 1)
        if self._pooled is Pooled.CLS:
            return output[:, 0]
        if self._pooled is Pooled.LAST:
            last: Vectors = output[np.arange(len(batch)), lengths - 1]
            return last
        shares = (mask / lengths[:, None]).astype(np.float32)
        means: Vectors = np.matmul(shares[:, None], output)[:, 0]
        return means
