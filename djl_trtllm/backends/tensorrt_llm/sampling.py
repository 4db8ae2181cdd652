"""A request as TensorRT-LLM's SamplingParams takes it.

Found in TensorRT-LLM's `sampling_params.py` and `llmapi/llm.py` (about 1.2): without an `end_id` of its own a request
goes through `SamplingParams._setup`, which takes the end and padding ids from the tokenizer and turns the strings of
`stop` and `bad` into token ids. With an `end_id` that does not happen, and a string then raises. So `end_id` is never
passed, the LLM has a tokenizer (`skip_tokenizer_init` stays off; guided decoding wants one too), and `detokenize` is
off: text is made above the executor. The tokenizer's end id is the only one the engine knows: the other end ids of
generation_config.json go as stop ids. `ignore_eos` takes away the end id and no stop id. A finished stop word is taken
off the tokens unless `include_stop_str_in_output`; here it stays, because stop strings are cut above. `logprobs` 0
counts as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from djl_trtllm.executor.protocol import Feature, Sampling, Submit
from djl_trtllm.request import Guide, GuideKind

_GUIDES = {
    GuideKind.JSON_SCHEMA: "json",
    GuideKind.REGEX: "regex",
    GuideKind.GRAMMAR: "grammar",
}
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_WITH_A_NEUTRAL_VALUE = {**_PENALTIES, "min_p": 0.0, "no_repeat_ngram_size": 0}
_TORCH_SAMPLER_IS_WHOLE = Version("1.4.0rc0")


@dataclass(frozen=True)
class Sampler:
    """What chooses the tokens in TensorRT-LLM. One that is not `whole` ignores, without a word, what it does not have.

    TorchSampler, the PyTorch backend's own, got bad words, penalties, no_repeat_ngram_size and min_p in July 2026
    (TensorRT-LLM #16052, #16485, #16594, #16590; until then #9442). The C++ sampler has them: the engine backend's,
    `sampler_type=TRTLLMSampler`, and what `auto` takes for beam search.
    """

    whole: bool
    version: str

    @classmethod
    def of(cls, version: str, backend: str, arguments: Mapping[str, Any]) -> Sampler:
        """The sampler of an LLM with these arguments, as plain data."""
        chosen = arguments.get("sampler_type", "auto")
        name = chosen["name"] if isinstance(chosen, Mapping) else chosen
        is_cpp = name == "TRTLLMSampler" or (name == "auto" and (arguments.get("max_beam_width") or 1) > 1)
        return cls(backend == "tensorrt" or is_cpp or Version(version) >= _TORCH_SAMPLER_IS_WHOLE, version)

    @property
    def features(self) -> list[Feature]:
        return [Feature.MIN_P, Feature.NO_REPEAT_NGRAM, Feature.BAD_WORDS] if self.whole else []

    def check(self, sampling: Sampling) -> None:
        """Raise ValueError for penalties that would be ignored."""
        if self.whole:
            return
        ignored = [name for name, neutral in _PENALTIES.items() if getattr(sampling, name) != neutral]
        if ignored:
            raise ValueError(
                f"the sampler of TensorRT-LLM {self.version}'s PyTorch backend ignores {' and '.join(ignored)}: leave "
                "it out, or set option.sampler_type=TRTLLMSampler"
            )


def sampling_arguments(request: Submit) -> dict[str, Any]:
    """The keyword arguments of SamplingParams, without the guide; fresh for each request, which changes them.

    What has its neutral value is left out. `max_tokens` is always there: its default is 32, and the scheduler reserves
    KV cache for all of it.
    """
    sampling = request.sampling
    arguments: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "detokenize": False}
    arguments |= _beams(sampling) if sampling.beam_width > 1 else _choice(sampling)
    for name, neutral in _WITH_A_NEUTRAL_VALUE.items():
        value = getattr(sampling, name)
        if value != neutral:
            arguments[name] = value
    if sampling.min_new_tokens:
        arguments["min_tokens"] = sampling.min_new_tokens
    if sampling.ignore_eos:
        arguments["ignore_eos"] = True
    if sampling.logprobs:
        arguments["logprobs"] = 1
    if request.stop_token_ids:
        arguments["stop_token_ids"] = list(request.stop_token_ids)
    if request.stop:
        arguments["stop"] = list(request.stop)
    if request.stop or request.stop_token_ids:
        arguments["include_stop_str_in_output"] = True
    if request.bad:
        arguments["bad"] = list(request.bad)
    return arguments


def guide_arguments(guide: Guide) -> dict[str, Any]:
    """The keyword arguments of GuidedDecodingParams."""
    return {"json_object": True} if guide.kind is GuideKind.JSON_OBJECT else {_GUIDES[guide.kind]: guide.value}


def _choice(sampling: Sampling) -> dict[str, Any]:
    if not sampling.do_sample:
        return {}  # none of temperature, top_k and top_p: greedy
    # All are always given: with one of them alone some versions take the request for greedy.
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }


def _beams(sampling: Sampling) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "use_beam_search": True,
        "best_of": sampling.beam_width,
        "n": sampling.beam_width,
        # TensorRT-LLM's own defaults are others: 0 and 1.
        "length_penalty": sampling.length_penalty,
        "early_stopping": int(sampling.early_stopping),
    }
    if sampling.beam_search_diversity_rate:
        arguments["beam_search_diversity_rate"] = sampling.beam_search_diversity_rate
    return arguments
