"""A request as TensorRT-LLM's SamplingParams.

Found in TensorRT-LLM's `sampling_params.py` and `llmapi/llm.py` (about 1.2): without an `end_id` of its own a request
goes through `SamplingParams._setup`, which takes the end and padding ids from the tokenizer and turns the strings of
`stop` and `bad` into token ids. With an `end_id` that does not happen, and a string then raises. So `end_id` is never
passed, the LLM has a tokenizer (`skip_tokenizer_init` stays off; guided decoding needs one too), and `detokenize` is
off: the server makes the text. The tokenizer's end id is the only one the engine knows: the other end ids of
generation_config.json are passed as stop ids. `ignore_eos` removes the end id and no stop id. A finished stop word is
removed from the tokens unless `include_stop_str_in_output`; here it stays, because the server cuts stop strings.
`logprobs` 0 means none, but for beams under TorchSampler of 1.3 (see `sampler`).
"""

from __future__ import annotations

from typing import Any

from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import Guide, GuideKind, Sampling

_GUIDES = {
    GuideKind.JSON_SCHEMA: "json",
    GuideKind.REGEX: "regex",
    GuideKind.GRAMMAR: "grammar",
}
_ARGUMENTS = {
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_p": "min_p",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "ignore_eos": "ignore_eos",
}
"""Fields of `Sampling` and their arguments, left out while they have the neutral value."""

_SAMPLED = ("temperature", "top_k", "top_p", "seed")
"""Arguments of requests that sample. All are always passed: with one alone some versions decode greedily."""

BEAM_FIELDS = ("length_penalty", "early_stopping", "beam_search_diversity_rate")
FIELDS = frozenset({"max_new_tokens", "do_sample", "stop_token_ids", "bad", *_ARGUMENTS, *_SAMPLED})
_NEUTRAL = Sampling()


def sampling_arguments(request: Submit, beam_logprobs: int | None = 1) -> dict[str, Any]:
    """The keyword arguments of SamplingParams, without the guide; a new dict for each request, which changes it.

    `max_tokens` is always passed: its default is 32, and the scheduler reserves KV cache for all of it.
    `beam_logprobs` is what the sampler wants for `logprobs` of beams (see `sampler.Sampler`).
    """
    sampling = request.sampling
    arguments: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "detokenize": False}
    if sampling.beam_width > 1:
        arguments |= _beams(sampling)
    elif sampling.do_sample:
        arguments |= {name: getattr(sampling, name) for name in _SAMPLED}
    for name, argument in _ARGUMENTS.items():
        value = getattr(sampling, name)
        if value != getattr(_NEUTRAL, name):
            arguments[argument] = value
    if request.logprobs:
        arguments["logprobs"] = max(1, request.top_logprobs) if sampling.beam_width == 1 else beam_logprobs
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
    return {"json_object": True} if guide.kind is GuideKind.JSON_OBJECT else {_GUIDES[guide.kind]: guide.value}


def _beams(sampling: Sampling) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "use_beam_search": True,
        "best_of": sampling.beam_width,
        "n": sampling.beam_width,
        # TensorRT-LLM's own defaults differ: 0 and 1.
        "length_penalty": sampling.length_penalty,
        "early_stopping": int(sampling.early_stopping),
    }
    if sampling.beam_search_diversity_rate:
        arguments["beam_search_diversity_rate"] = sampling.beam_search_diversity_rate
    return arguments
