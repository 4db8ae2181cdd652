from __future__ import annotations

import copy

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import TokensInput
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest


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
            assert supported_tasks == (params.task,)
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
