"""A vLLM as far as the executor uses it, in one file: its next token is the last one's successor.

`_MODULES` says in which modules vLLM has each name. `python -m tools.vllm.names` compares the classes with the table,
and the table with an installed vLLM.
"""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypedDict

import numpy as np

__version__ = "0.32.0"
__path__: list[str] = []  # it is a package

VOCABULARY, BLOCKS, END = 2048, 64, 2
MARK, TOKENS = 2046, 4


class EngineArgs(SimpleNamespace):
    """All arguments are taken."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)


class VLLMClientError(Exception):
    """The request is wrong."""


class UsageContext(str, Enum):
    OPENAI_API_SERVER = "OPENAI_API_SERVER"


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclass
class PoolingParams:
    task: str | None = None
    use_activation: bool | None = None
    extra_kwargs: dict[str, Any] | None = None


@dataclass
class StructuredOutputsParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    structural_tag: str | None = None


@dataclass
class SamplingParams:
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_clone: bool = False
    bad_words_token_ids: list[list[int]] | None = None
    all_stop_token_ids: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        outside = self.temperature < 0 or self.max_tokens < 1 or not 0 < self.top_p <= 1
        if outside or abs(self.presence_penalty) > 2 or self.repetition_penalty <= 0:
            raise VLLMClientError("a parameter is out of range")


@dataclass
class PoolerConfig:
    seq_pooling_type: str | None = None


@dataclass
class StructuredOutputsConfig:
    backend: str = "auto"


@dataclass
class ModelConfig:
    max_model_len: int
    dtype: str = "torch.float32"

    def get_vocab_size(self) -> int:
        return 1024


class _InputOptions(TypedDict, total=False):
    cache_salt: str


class TokensInput(_InputOptions):
    type: str
    prompt_token_ids: list[int]


class _PromptOptions(TypedDict, total=False):
    multi_modal_data: dict[str, list[Any]]
    multi_modal_uuids: dict[str, list[str]]
    cache_salt: str


class TokensPrompt(_PromptOptions):
    prompt_token_ids: list[int]


class ProcessorCache(list[str]):
    """The names of images, as vLLM's two caches have them."""

    def invalidate(self, mm_hash: str) -> None:
        self[:] = [each for each in self if each != mm_hash]


class BaseRenderer:
    """Each MARK of a prompt becomes four."""

    def __init__(self) -> None:
        self.cached = self.mm_processor_cache = ProcessorCache()

    def render_cmpl(self, prompts: list[TokensPrompt]) -> list[dict[str, Any]]:
        (prompt,) = prompts
        names = prompt["multi_modal_uuids"]["image"]
        assert len(names) == len(prompt["multi_modal_data"]["image"])
        self.cached += names
        ids = [each for id_ in prompt["prompt_token_ids"] for each in [id_] * (TOKENS if id_ == MARK else 1)]
        return [{**prompt, "type": "multimodal", "prompt_token_ids": ids, "mm_hashes": {"image": names}}]


class LogprobsLists(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any


class LogprobsTensors(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any


def expand_batch_to_tokens(x: Any, cu_num_tokens: Any, num_tokens: int) -> Any:
    raise NotImplementedError


@dataclass
class SpecDecodingStats:
    num_drafts: int = 0
    num_draft_tokens: int = 0


@dataclass
class PrefillStats:
    num_cached_tokens: int = 0


@dataclass
class RequestSpecDecodeMetrics:
    num_draft_tokens: int = 0


@dataclass
class PrefixCacheStats:
    queries: int = 0
    hits: int = 0


@dataclass
class SchedulerStats:
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    spec_decoding_stats: SpecDecodingStats | None = None


class EngineDeadError(Exception):
    """Nothing runs any more."""


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass
class EngineCoreRequest:
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: Any  # SamplingParams | None
    lora_request: LoRARequest | None
    external_req_id: str | None = None
    cache_salt: str | None = None
    pooling_params: Any = None


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    finish_reason: FinishReason | None = None
    prefill_stats: PrefillStats | None = None
    pooling_output: Any = None
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None


@dataclass
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None


class Tensor:
    """The methods of torch's tensors that the executor uses."""

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


class InputProcessor:
    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.renderer = BaseRenderer()

    def process_inputs(
        self,
        request_id: str,
        prompt: TokensInput,
        params: SamplingParams | PoolingParams,
        supported_tasks: tuple[str, ...],
        lora_request: LoRARequest | None = None,
    ) -> EngineCoreRequest:
        salt = prompt.get("cache_salt")
        if isinstance(params, PoolingParams):
            assert supported_tasks == (params.task,) and params.task in ("embed", "classify")
            return EngineCoreRequest(
                request_id, prompt["prompt_token_ids"], None, None, cache_salt=salt, pooling_params=params
            )
        assert prompt["type"] in ("token", "multimodal") and supported_tasks == ("generate",)
        if len(prompt["prompt_token_ids"]) >= self._max_model_len:
            raise VLLMClientError("the prompt is longer than the maximum model length")
        # As 0.32 does, whatever `skip_clone` says.
        params = copy.copy(params)
        spellings = [text for word in params.bad_words for text in (word, f" {word}")]
        params.bad_words_token_ids = [list(text.encode()) for text in spellings]
        params.all_stop_token_ids = {1, *params.stop_token_ids}
        if max(params.logit_bias or (0,)) >= 2048:
            raise VLLMClientError("token_id(s) in logit_bias contain out-of-vocab token ids")
        return EngineCoreRequest(request_id, prompt["prompt_token_ids"], params, lora_request, cache_salt=salt)


class LLMEngine:
    def __init__(self, arguments: EngineArgs) -> None:
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=BLOCKS, block_size=16),
            model_config=ModelConfig(arguments.max_model_len),
            device_config=SimpleNamespace(device_type="cpu"),
            speculative_config=getattr(arguments, "speculative_config", None),
            lora_config=object() if getattr(arguments, "enable_lora", False) else None,
        )
        self.input_processor = InputProcessor(arguments.max_model_len)
        self.engine_core = InprocClient(
            arguments.max_num_seqs,
            self.vllm_config.speculative_config is not None,
            getattr(arguments, "per_request_spec_decode_metrics", "none") != "none",
        )

    def reset_mm_cache(self) -> None:
        self.input_processor.renderer.cached.clear()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: UsageContext) -> LLMEngine:
        assert usage_context is UsageContext.OPENAI_API_SERVER
        return cls(engine_args)


_MODULES: dict[str, tuple[Any, ...]] = {
    "config": (PoolerConfig, StructuredOutputsConfig),
    "config.model": (ModelConfig,),
    "config.pooler": (PoolerConfig,),
    "exceptions": (VLLMClientError,),
    "inputs": (),
    "inputs.engine": (TokensInput,),
    "inputs.llm": (TokensPrompt,),
    "lora": (),
    "lora.request": (LoRARequest,),
    "pooling_params": (PoolingParams,),
    "renderers": (),
    "renderers.base": (BaseRenderer,),
    "sampling_params": (SamplingParams, StructuredOutputsParams),
    "usage": (),
    "usage.usage_lib": (UsageContext,),
    "v1": (),
    "v1.engine": (FinishReason, EngineCoreRequest, EngineCoreOutput, EngineCoreOutputs),
    "v1.engine.core_client": (InprocClient,),
    "v1.engine.exceptions": (EngineDeadError,),
    "v1.engine.input_processor": (InputProcessor,),
    "v1.engine.llm_engine": (LLMEngine,),
    "v1.metrics": (),
    "v1.metrics.stats": (PrefillStats, RequestSpecDecodeMetrics, PrefixCacheStats, SchedulerStats),
    "v1.outputs": (LogprobsLists, LogprobsTensors),
    "v1.sample": (),
    "v1.sample.rejection_sampler": (expand_batch_to_tokens,),
    "v1.spec_decode": (),
    "v1.spec_decode.metrics": (SpecDecodingStats,),
}
for _path, _objects in _MODULES.items():
    _module = sys.modules[f"{__name__}.{_path}"] = ModuleType(f"{__name__}.{_path}")
    for _object in _objects:
        setattr(_module, _object.__name__, _object)
    _above, _, _last = f"{__name__}.{_path}".rpartition(".")
    setattr(sys.modules[_above], _last, _module)
