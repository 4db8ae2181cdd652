"""A request as OpenVINO GenAI's GenerationConfig."""

from __future__ import annotations

from openvino_genai import GenerationConfig

from djl_trtllm.backends.openvino.guide_compiler import structured_output
from djl_trtllm.executor.protocol import Feature, Submit

_ARGUMENTS = (
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields of `Sampling` that GenerationConfig has under the same names."""

_SAMPLED = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "seed": "rng_seed"}
"""The same for sequences that are not greedy, with GenerationConfig's names."""

FEATURES: frozenset[str] = frozenset(
    {*_ARGUMENTS, *_SAMPLED, "ignore_eos", "stop_token_ids", Feature.LOGPROBS, Feature.FREE_LOGPROBS}
)
"""What OpenVINO honours, see `Ready.features`."""

GUIDES: frozenset[str] = frozenset({Feature.JSON, Feature.REGEX, Feature.GRAMMAR})
"""What it honours where the engine has a tokenizer of OpenVINO."""


def generation_config(request: Submit) -> GenerationConfig:
    sampling = request.sampling
    config = GenerationConfig()
    for name in _ARGUMENTS:
        setattr(config, name, getattr(sampling, name))
    if sampling.do_sample:
        for name, argument in _SAMPLED.items():
            setattr(config, argument, getattr(sampling, name))
    # ignore_eos would disable stop_token_ids as well; it is not needed when there are no end ids among them.
    config.ignore_eos = sampling.ignore_eos and not request.stop_token_ids
    config.logprobs = 1 if request.logprobs else 0
    if request.stop_token_ids:
        config.set_eos_token_id(request.stop_token_ids[0])
        config.stop_token_ids = set(request.stop_token_ids)
    if request.guide is not None:
        config.structured_output_config = structured_output(request.guide)
    return config
