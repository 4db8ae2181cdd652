"""What an executor cannot do is refused by name; what it can is handed on."""

from __future__ import annotations

from itertools import product

import pytest

from djl_trtllm.batching import GenerationRequest, SamplingParameters
from djl_trtllm.batching.features import gives_logprobs, require
from djl_trtllm.errors import UnsupportedParameterError
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.request import Guide, GuideKind

ON_TENSORRT_LLM = (
    "this engine cannot hold its output to a form; on TensorRT-LLM set option.guided_decoding_backend=xgrammar"
)


def asking(prompt: str = "a", **sampling: object) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, sampling=SamplingParameters(**sampling))  # type: ignore[arg-type]


ASKING = {
    Feature.BEAM_SEARCH: [asking(beam_width=2)],
    Feature.MIN_P: [asking(min_p=0.1)],
    Feature.NO_REPEAT_NGRAM: [asking(no_repeat_ngram_size=1)],
    Feature.BAD_WORDS: [GenerationRequest(prompt="a", bad=("x",))],
    Feature.JSON: [
        GenerationRequest(prompt="a", guide=Guide(GuideKind.JSON_OBJECT)),
        GenerationRequest(prompt="a", guide=Guide(GuideKind.JSON_SCHEMA, "{}")),
    ],
    Feature.REGEX: [GenerationRequest(prompt="a", guide=Guide(GuideKind.REGEX, "a+"))],
    Feature.GRAMMAR: [GenerationRequest(prompt="a", guide=Guide(GuideKind.GRAMMAR, "root"))],
    Feature.ADAPTERS: [GenerationRequest(prompt="a", adapter="french")],
    Feature.LOGPROBS: [GenerationRequest(prompt="a", logprobs=True, needs_logprobs=True)],
}
REFUSALS = {
    Feature.BEAM_SEARCH: "'num_beams' ('beam_width'): this engine has no beam search; use 'n' and 'best_of' with "
    "sampling, or TensorRT-LLM with option.max_beam_width",
    Feature.MIN_P: "'min_p': use 'top_p'",
    Feature.NO_REPEAT_NGRAM: "'no_repeat_ngram_size': use 'repetition_penalty'",
    Feature.BAD_WORDS: "'bad_words' ('bad_sequences'): this engine cannot keep words out",
    Feature.JSON: f"a JSON guide: {ON_TENSORRT_LLM}",
    Feature.REGEX: f"a regular expression: {ON_TENSORRT_LLM}",
    Feature.GRAMMAR: f"a grammar: {ON_TENSORRT_LLM}",
    Feature.ADAPTERS: "'adapters': this model is served without LoRA adapters; on TensorRT-LLM set "
    "option.enable_lora=true",
    Feature.LOGPROBS: "'logprobs' or 'best_of': this engine gives no log-probabilities; on a compiled TensorRT engine "
    "set option.gather_generation_logits=true",
}


def test_every_feature_can_be_asked_for() -> None:
    assert set(ASKING) == set(REFUSALS) == set(Feature) - {Feature.FREE_LOGPROBS}


@pytest.mark.parametrize("feature", ASKING)
def test_a_request_needs_the_features_it_asks_for_and_no_other(feature: Feature) -> None:
    for request in ASKING[feature]:
        require(request, {feature})
        with pytest.raises(UnsupportedParameterError) as caught:
            require(request, set(Feature) - {feature})
        assert str(caught.value) == f"not supported by this backend: {REFUSALS[feature]}"


def test_all_that_is_missing_is_in_one_message() -> None:
    request = GenerationRequest(prompt="a", bad=("x",), sampling=SamplingParameters(min_p=0.1))
    with pytest.raises(UnsupportedParameterError) as caught:
        require(request, set())
    missing = f"{REFUSALS[Feature.MIN_P]}; {REFUSALS[Feature.BAD_WORDS]}"
    assert str(caught.value) == f"not supported by this backend: {missing}"


def test_a_plain_request_needs_nothing() -> None:
    require(GenerationRequest(prompt="a", logprobs=True, stop=("x",)), set())


@pytest.mark.parametrize(("asks", "needs", "free"), list(product((False, True), repeat=3)))
def test_log_probabilities_go_to_those_who_want_them_or_where_they_are_free(
    asks: bool, needs: bool, free: bool
) -> None:
    request = GenerationRequest(prompt="a", logprobs=True, asks_logprobs=asks, needs_logprobs=needs)
    features = {Feature.FREE_LOGPROBS} if free else set()
    assert gives_logprobs(request, features | {Feature.LOGPROBS}) is (asks or needs or free)
    assert not gives_logprobs(request, features)
