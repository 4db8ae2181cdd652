from __future__ import annotations

from dataclasses import dataclass, field

from vllm.exceptions import VLLMClientError


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
        if self.temperature < 0 or self.max_tokens < 1 or not 0 < self.top_p <= 1 or abs(self.presence_penalty) > 2:
            raise VLLMClientError("a parameter is out of range")
