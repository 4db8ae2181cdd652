"""OpenVINO GenAI's `ContinuousBatchingPipeline` as an executor: in-flight batching with a paged KV cache on the CPU.

Beyond the protocol, the caller must never submit more requests than their KV cache blocks (prompt and whole output,
plus one block each) fit into `Limits.kv_blocks`. An iteration that can schedule nothing loses every live request
(`IGNORED`); the rolling batch's admission prevents that.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino_genai import GenerationFinishReason, GenerationStatus, SchedulerConfig
from openvino_genai.py_openvino_genai import ContinuousBatchingPipeline, GenerationHandle

from djl_trtllm.backends.openvino.engine_files import NO_ATTENTION, has_tokenizer
from djl_trtllm.backends.openvino.guide_compiler import GuideCompiler
from djl_trtllm.backends.openvino.guided_requests import GuidedRequests
from djl_trtllm.backends.openvino.prefix import PrefixCacheMirror
from djl_trtllm.backends.openvino.sampling import FEATURES, GUIDES, generation_config
from djl_trtllm.executor.guide_checker import GuideChecker
from djl_trtllm.executor.protocol import Delta, Limits, Stats, Submit
from djl_trtllm.request import FinishReason

BLOCK_SIZE = 32
"""Tokens per KV cache block; fixed in OpenVINO's CPU plugin."""

_GUIDE_PROGRAM = "djl_trtllm.backends.openvino.guide_process"

# A pybind11 enum compares through a Python call; identities of its values do not.
_LENGTH = GenerationFinishReason.LENGTH


class _Sequence:
    __slots__ = ("cached_tokens", "cancelled", "handle", "logprobs", "token_ids")

    def __init__(self, handle: GenerationHandle, request: Submit, cached_tokens: int) -> None:
        self.handle = handle
        self.logprobs = request.logprobs
        self.cached_tokens = cached_tokens
        self.token_ids = list(request.prompt_ids)
        self.cancelled = False


class OpenVinoExecutor:
    """See `djl_trtllm.executor.process.Executor`."""

    def __init__(
        self,
        *,
        engine_dir: str,
        max_num_batched_tokens: int,
        num_kv_blocks: int,
        enable_prefix_caching: bool,
        kv_cache_precision: str,
        inference_precision: str,
        max_sequences: int,
        max_seq_len: int,
        num_threads: int | None = None,
    ) -> None:
        scheduler = SchedulerConfig()
        scheduler.max_num_batched_tokens = max_num_batched_tokens
        scheduler.num_kv_blocks = num_kv_blocks
        scheduler.enable_prefix_caching = enable_prefix_caching
        # Without split fuse, a prompt longer than max_num_batched_tokens raises inside step(), and over-committed runs
        # were seen to segfault. With it, max_num_seqs has no effect: the rolling batch holds the batch size.
        scheduler.dynamic_split_fuse = True
        # The plugin's default KV cache precision is u8, which changes greedy output.
        properties: dict[str, Any] = {
            "KV_CACHE_PRECISION": kv_cache_precision,
            "INFERENCE_PRECISION_HINT": inference_precision,
        }
        if num_threads is not None:
            properties["INFERENCE_NUM_THREADS"] = num_threads
        try:
            self._pipeline = ContinuousBatchingPipeline(engine_dir, scheduler, "CPU", properties, {})
        except RuntimeError as error:
            if "sdpa_to_paged_attention" not in str(error):
                raise
            raise RuntimeError(
                f"{NO_ATTENTION}: the model in {engine_dir} has no attention layers whose KV cache could be paged"
            ) from error
        self._sequences: dict[int, _Sequence] = {}
        self._rejected: list[Delta] = []
        self._prefixes = (
            PrefixCacheMirror(capacity=num_kv_blocks, block_size=BLOCK_SIZE) if enable_prefix_caching else None
        )
        self.limits = Limits(
            max_sequences=max_sequences, kv_blocks=num_kv_blocks, block_size=BLOCK_SIZE, max_seq_len=max_seq_len
        )
        # OpenVINO GenAI compiles guides for the tokenizer beside the model; nothing else here needs its tokenizer.
        self._guided: GuidedRequests | None = None
        if has_tokenizer(Path(engine_dir)):
            tokenizer = self._pipeline.get_tokenizer()
            self._guided = GuidedRequests(GuideChecker(_GUIDE_PROGRAM, engine_dir), partial(GuideCompiler, tokenizer))
        self.features = FEATURES if self._guided is None else FEATURES | GUIDES
        self.details = {
            "OpenVINO": ov.get_version(),
            "KV cache": kv_cache_precision,
            "inference": inference_precision,
        }

    def close(self) -> None:
        """End what runs beside the engine; it also ends with this process."""
        if self._guided is not None:
            self._guided.close()

    @property
    def busy(self) -> bool:
        # A cancelled request's blocks are given back at the end of the next step.
        if self._sequences or self._rejected or (self._guided is not None and self._guided.waiting):
            return True
        unfinished: bool = self._pipeline.has_non_finished_requests()
        return unfinished

    def submit(self, request: Submit) -> None:
        if request.guide is None or self._guided is None:
            self._add(request)
        elif (refused := self._guided.hold(request)) is not None:
            self._rejected.append(refused)

    def _add(self, request: Submit) -> None:
        prompt = np.array([request.prompt_ids], dtype=np.int64)
        cached = self._prefixes.reused_tokens(request.prompt_ids) if self._prefixes else 0
        try:
            handle = self._pipeline.add_request(request.request_id, ov.Tensor(prompt), generation_config(request))
        except (RuntimeError, TypeError, ValueError) as error:
            self._rejected.append(Delta(request.request_id, [], finish=FinishReason.ERROR, error=str(error)))
            return
        self._sequences[request.request_id] = _Sequence(handle, request, cached)

    def cancel(self, request_id: int) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.cancelled = True
            sequence.handle.cancel()
        elif self._guided is not None and (cancelled := self._guided.cancel(request_id)) is not None:
            self._rejected.append(cancelled)

    def step(self) -> list[Delta]:
        if self._guided is not None and self._guided.waiting:
            ready, refused = self._guided.advance(wait=not self._pipeline.has_non_finished_requests())
            self._rejected += refused
            for request in ready:
                self._add(request)
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        deltas, self._rejected = self._rejected, []
        for request_id, sequence in list(self._sequences.items()):
            delta = self._collect(request_id, sequence)
            if delta is not None:
                deltas.append(delta)
                if delta.finish:
                    del self._sequences[request_id]
        return deltas

    def stats(self) -> Stats:
        # The pipeline's figures are those of its last schedule, stale when it has nothing to run.
        usage = self._pipeline.get_metrics().cache_usage / 100 if self._sequences else 0.0
        blocks = self.limits.kv_blocks
        return Stats(len(self._sequences), usage, kv_blocks=blocks, kv_blocks_used=round(usage * blocks))

    def _collect(self, request_id: int, sequence: _Sequence) -> Delta | None:
        if sequence.cancelled:
            return self._end(sequence, Delta(request_id, [], finish=FinishReason.CANCELLED))
        handle = sequence.handle
        # read() with nothing queued blocks for ever, with the GIL held.
        if not handle.can_read():
            if handle.get_status() == GenerationStatus.IGNORED:
                error = "the engine dropped the request: its KV cache is over-committed"
                return self._end(sequence, Delta(request_id, [], finish=FinishReason.ERROR, error=error))
            return None
        (output,) = handle.read().values()
        delta = Delta(request_id, output.generated_ids, output.generated_log_probs if sequence.logprobs else None)
        if sequence.cached_tokens:
            delta.cached_tokens, sequence.cached_tokens = sequence.cached_tokens, 0
        if self._prefixes:
            sequence.token_ids += delta.token_ids
        reason = output.finish_reason
        if reason != GenerationFinishReason.NONE:
            delta.finish = FinishReason.LENGTH if reason == _LENGTH else FinishReason.STOP
            self._end(sequence, delta)
        return delta

    def _end(self, sequence: _Sequence, delta: Delta) -> Delta:
        if self._prefixes and sequence.token_ids:
            # The KV cache of the last token is never computed.
            self._prefixes.remember(sequence.token_ids[:-1])
        return delta
