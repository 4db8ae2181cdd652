from __future__ import annotations

import random

import numpy as np

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.spec_decode.metrics import SpecDecodingStats

VOCABULARY, BLOCKS, END = 2048, 64, 2


class Tensor:
    """As much of torch's as the executor uses."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def float(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return self._values


class InprocClient:
    """One token of each request in an iteration; output comes an iteration late. `lost` ends the engine.

    With `speculates` a draft proposes 3 tokens in each iteration but the first, of which 2 are right.
    """

    def __init__(self, max_num_seqs: int, speculates: bool = False, counts_drafts: bool = False) -> None:
        self._speculates, self._counts_drafts = speculates, counts_drafts
        self._drafted: dict[str, int] = {}
        self.lost: Exception | None = None
        self.requests: dict[str, EngineCoreRequest] = {}
        self.closed = False
        self._max_num_seqs = max_num_seqs
        self._tokens: dict[str, list[int]] = {}
        self._late: list[EngineCoreOutput] = []
        self._pooled: list[EngineCoreRequest] = []
        self._prompts: list[tuple[str | None, list[int]]] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        if self.lost is not None:
            raise EngineDeadError
        assert request.request_id not in self.requests
        if request.pooling_params is not None:
            self._pooled.insert(0, request)
            return
        assert request.external_req_id is not None
        self.requests[request.request_id] = request
        self._tokens[request.request_id] = []

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def shutdown(self) -> None:
        self.closed = True

    def get_output(self) -> EngineCoreOutputs:
        if self.lost is not None:
            raise self.lost
        if self._pooled:  # the last one first
            return EngineCoreOutputs([self._vector(self._pooled.pop(0))])
        queries = hits = 0
        drafted = SpecDecodingStats() if self._speculates else None
        late, self._late = self._late, []
        for request in list(self.requests.values())[: self._max_num_seqs]:
            prefill = None
            if not self._tokens[request.request_id]:
                cached = 16 * ((len(request.prompt_token_ids) - 1) // 16)
                known = (request.cache_salt, request.prompt_token_ids)
                is_cached = known in self._prompts and request.sampling_params.prompt_logprobs is None
                prefill = PrefillStats(cached if is_cached else 0)
                self._prompts.append(known)
                queries, hits = queries + len(request.prompt_token_ids), hits + prefill.num_cached_tokens
            output = self._next(request, prefill)
            self._late.append(output)
            if drafted is not None and prefill is None:
                drafted.num_drafts += 1
                drafted.num_draft_tokens += 3
                for _ in range(2):
                    if output.finish_reason is None:
                        more = self._next(request, None)
                        output.new_token_ids += more.new_token_ids
                        output.finish_reason = more.finish_reason
                self._drafted[request.request_id] = self._drafted.get(request.request_id, 0) + 3
            if self._counts_drafts and output.finish_reason is not None:
                output.spec_decode_metrics = RequestSpecDecodeMetrics(self._drafted.get(request.request_id, 0))
        usage = min(1.0, len(self.requests) / BLOCKS)
        waiting = max(0, len(self.requests) - self._max_num_seqs)
        return EngineCoreOutputs(late, SchedulerStats(waiting, 0, usage, PrefixCacheStats(queries, hits), drafted))

    def _vector(self, request: EngineCoreRequest) -> EngineCoreOutput:
        """Numbers that follow from the prompt; a score is the number of tokens in its second text."""
        ids, params = np.array(request.prompt_token_ids, np.float32), request.pooling_params
        assert params.use_activation is False
        vector = np.array([ids.sum(), len(ids), ids[-1]], np.float32)
        if params.task == "classify":
            begin = (params.extra_kwargs or {}).get("compressed_token_type_ids", len(ids))
            vector = np.array([len(ids) - begin], np.float32)
        output = Tensor(vector)
        return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.STOP, pooling_output=output)

    def _next(self, request: EngineCoreRequest, prefill: PrefillStats | None) -> EngineCoreOutput:
        params, tokens = request.sampling_params, self._tokens[request.request_id]
        token = (([*request.prompt_token_ids, *tokens])[-1] + 1) % VOCABULARY
        if params.temperature:
            token = random.Random(f"{params.seed} {len(tokens)}").randrange(VOCABULARY)
        if len(tokens) < params.min_tokens and token in params.stop_token_ids:
            token += 1
        if params.logit_bias:
            token = max(params.logit_bias, key=params.logit_bias.__getitem__)
        tokens.append(token)
        scores = None
        if params.prompt_logprobs is not None and len(tokens) == 1:
            most = params.prompt_logprobs
            rows = [[id_, *range(most)] for id_ in request.prompt_token_ids[1:]]
            scores = LogprobsTensors(np.array(rows), np.array([[-2.0, *(-0.5 - at for at in range(most))]] * len(rows)))
        logprobs = None
        if params.logprobs is not None:
            ids = [token, *((token + at) % VOCABULARY for at in range(params.logprobs))]
            values = [-0.5, *(-0.5 - at for at in range(params.logprobs))]
            logprobs = LogprobsLists(np.array([ids]), np.array([values]))
        finish = FinishReason.LENGTH if len(tokens) == params.max_tokens else None
        if token in params.stop_token_ids or (token == END and not params.ignore_eos):
            finish = FinishReason.STOP
        if finish is not None:
            del self.requests[request.request_id]
        return EngineCoreOutput(request.request_id, [token], logprobs, scores, finish, prefill)
