"""What an executor cannot do is refused by name; what it can is handed on."""

from __future__ import annotations

import pytest

from djl_trtllm.batching import GenerationRequest, SamplingParameters
from djl_trtllm.batching.features import gives_logprobs, require
from djl_trtllm.errors import UnsupportedParameterError
from djl_trtllm.executor.protocol import Adapter, Feature, Guide, GuideKind
from djl_trtllm.model import Tokenizer

from .helpers import Bench

ASKING = {
    Feature.BEAM_SEARCH: GenerationRequest(prompt="a", sampling=SamplingParameters(beam_width=2)),
    Feature.MIN_P: GenerationRequest(prompt="a", sampling=SamplingParameters(min_p=0.1)),
    Feature.NO_REPEAT_NGRAM: GenerationRequest(prompt="a", sampling=SamplingParameters(no_repeat_ngram_size=2)),
    Feature.BAD_WORDS: GenerationRequest(prompt="a", bad=("x",)),
    Feature.JSON: GenerationRequest(prompt="a", guide=Guide(GuideKind.JSON_OBJECT)),
    Feature.REGEX: GenerationRequest(prompt="a", guide=Guide(GuideKind.REGEX, "a+")),
    Feature.GRAMMAR: GenerationRequest(prompt="a", guide=Guide(GuideKind.GRAMMAR, "root")),
    Feature.ADAPTERS: GenerationRequest(prompt="a", adapter="french"),
    Feature.LOGPROBS: GenerationRequest(prompt="a", logprobs=True, needs_logprobs=True),
}


def test_every_feature_can_be_asked_for() -> None:
    assert set(ASKING) == set(Feature) - {Feature.FREE_LOGPROBS}


def test_log_probabilities_that_cost_something_come_to_those_who_ask() -> None:
    shown, asked = (GenerationRequest(prompt="a", logprobs=True, asks_logprobs=asks) for asks in (False, True))
    assert not gives_logprobs(shown, {Feature.LOGPROBS})
    assert gives_logprobs(asked, {Feature.LOGPROBS})
    assert gives_logprobs(shown, {Feature.LOGPROBS, Feature.FREE_LOGPROBS})
    assert not gives_logprobs(asked, set())


@pytest.mark.parametrize("feature", ASKING)
def test_a_request_needs_the_features_it_asks_for_and_no_other(feature: Feature) -> None:
    require(ASKING[feature], {feature})
    with pytest.raises(UnsupportedParameterError, match=r"not supported by this backend: .+: .+"):
        require(ASKING[feature], set(Feature) - {feature})


def test_all_that_is_missing_is_told_at_once() -> None:
    request = GenerationRequest(prompt="a", bad=("x",), sampling=SamplingParameters(min_p=0.1))
    with pytest.raises(UnsupportedParameterError, match=r"'min_p'.*'bad_words'"):
        require(request, set())


def test_a_plain_request_needs_nothing() -> None:
    require(GenerationRequest(prompt="a", logprobs=True, stop=("x",)), set())


def test_the_executor_is_told_all_of_it(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    guide, adapter = Guide(GuideKind.REGEX, "a+"), Adapter("french", 3, "adapters/french")
    bench.submit(guide=guide, adapter=adapter, bad=("x",), min_p=0.25, no_repeat_ngram_size=2)
    (message,) = bench.executor.submitted
    assert (message.guide, message.adapter, message.bad) == (guide, adapter, ["x"])
    assert (message.sampling.min_p, message.sampling.no_repeat_ngram_size) == (0.25, 2)


def test_a_stop_string_goes_to_the_engine_where_its_tokens_mean_exactly_it(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    exact = "wolf"
    changed = "wolf\N{REPLACEMENT CHARACTER}\ud7ff\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(exact, False), False) == exact
    bench.submit(stop=(exact,))
    assert bench.executor.submitted[0].stop == [exact]
    if tokenizer.decode(tokenizer.encode(changed, False), False) != changed:
        bench.submit(stop=(exact, changed))
        assert bench.executor.submitted[1].stop == [exact]
