"""Samplers: each test holds one rule of TensorRT-LLM's source, and names the file and the version that it is from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .observing import Observer, call

GUIDED = {"class": "GuidedDecodingParams", "json_object": True}
BEAMS: dict[str, Any] = {"max_tokens": 3, "n": 2, "use_beam_search": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"length_penalty": -0.5}, "lengthPenalty.value() >= 0.f"),
    ({"top_p": 0.0}, "topP.value() > 0.f"),
    ({"beam_search_diversity_rate": -1.0}, "beamSearchDiversityRate.value() >= 0.f"),
    ({"repetition_penalty": 0.0}, "repetitionpenalty.value() > 0.f"),
    ({"early_stopping": -1}, "earlyStopping.value() >= 0"),
    ({"min_tokens": -1}, "minTokens.value() >= 0"),
    ({"min_p": 1.5}, "minP.value() >= 0.f && minP.value() <= 1.0f"),
    ({"no_repeat_ngram_size": -1}, "noRepeatNgramSize.value() >= 0"),
    ({"n": 1025, "use_beam_search": True}, "beamWidth > 0 && beamWidth <= kMaxBeamWidth"),
    ({"max_tokens": 0}, "mMaxNewTokens > 0"),
    ({**BEAMS, "guided_decoding": GUIDED}, "Guided decoding does not support with beam search."),
]


def test_the_runtime_checks_every_request(observe: Observer, tiny_stories: Path) -> None:
    """samplingConfig.cpp (@3585984b), requestImpl.h (@04fa274f): a request's own error; others are served."""
    requests = [{"max_tokens": 3, **fields} for fields, _ in REFUSED]
    *refused, served = observe(call("requests", which="torch", model=tiny_stories, requests=[*requests, {"top_k": 1}]))
    for answer, (_, condition) in zip(refused, REFUSED, strict=True):
        assert answer.startswith("RequestError: [TensorRT-LLM][ERROR] ") and condition in answer
    assert served["reason"] == "length"


def test_another_number_of_beams_ends_the_loop_of_1_2_0_and_is_the_requests_error_later(
    observe: Observer, tiny_stories: Path
) -> None:
    """executor_request_queue.py (@a98a9061) asserts; py_executor.py, `_validate_request` (#9228)."""
    asked = {"which": "torch", "model": tiny_stories, "max_beam_width": 2, "shut_down": False}
    wrong, right = {"max_tokens": 3}, BEAMS
    ended = observe(call("requests", **asked, requests=[right, wrong, right]), version="1.2.0")
    assert [ended[0]["reason"], *ended[1:]] == ["length", "hangs", "hangs"]
    assert "Error in event loop: Request beam width 1 is not equal to max_beam_width 2." in observe.printed
    goes_on = observe(call("requests", **asked, requests=[right, wrong, right]))
    assert [goes_on[0]["reason"], goes_on[2]["reason"]] == ["length", "length"]
    assert goes_on[1].startswith("RequestError: Request beam width 1 is not equal to max_beam_width 2.")


def test_log_probabilities_of_beams_end_an_engine_with_gathered_logits(observe: Observer, tiny_stories: Path) -> None:
    """compute_logprobs in executor/result.py (about 1.2): in the thread of the results; raised at the next request."""
    build = {"class": "BuildConfig", "max_beam_width": 2}
    seen = observe(
        call(
            "requests",
            which="engine",
            model=tiny_stories,
            build_config=build,
            gather_generation_logits=True,
            requests=[{"max_tokens": 3, "logprobs": 1}, BEAMS, {**BEAMS, "logprobs": 1}, {}, {}],
            shut_down=False,
        )
    )
    assert [seen[0]["reason"], seen[1]["reason"], seen[2]] == ["length", "length", "hangs"]
    assert seen[3].startswith("IndexError: index ") and "is out of bounds" in seen[3]
    assert seen[4] == "RuntimeError: LLM is shutting down"


@pytest.mark.parametrize(
    ("version", "sampler", "asked", "given"),
    [
        ("1.2.1", "auto", 1, [3, 3]),
        ("1.3.0", "auto", 1, None),
        ("1.3.0", "auto", 0, [3, 3]),
        ("1.3.0", "TRTLLMSampler", 1, [3, 3]),
    ],
)
def test_beams_have_log_probabilities_of_the_chosen_tokens(
    observe: Observer, tiny_stories: Path, version: str, sampler: str, asked: int, given: list[int] | None
) -> None:
    """TorchSampler.validate_request (#11584, about 1.3.0rc5), which `auto` is for beams from 1.3 on (#11938)."""
    request = {**BEAMS, "logprobs": asked}
    arguments = {"which": "torch", "model": tiny_stories, "max_beam_width": 2, "sampler_type": sampler}
    if given is None:
        (refused,) = observe(call("requests", **arguments, requests=[request]), version=version)
        assert refused == "RequestError: Beam search only supports returning the sampled logprob per token"
    else:
        seen = observe(call("outputs", **arguments, request=request), version=version)
        assert [sequence["logprobs"] for sequence in seen] == given


def drawn(observe: Observer, model: Path, seeds: list[int | None], version: str = "1.2.1", **arguments: Any) -> Any:
    """The tokens of one sampled request after the other."""
    requests = [{"max_tokens": 2, "temperature": 1.0, "seed": seed} for seed in seeds]
    made = {"which": "torch", "model": model, **arguments}
    seen = observe(call("requests", **made, requests=requests), version=version, script={"sampled": True})
    return [answer["tokens"] for answer in seen]


def test_seeds(observe: Observer, tiny_stories: Path) -> None:
    """TorchSampler: one generator, seed 42 (_torch/pyexecutor/sampler.py, about 1.2); requests' seeds since #17172."""
    first, second, again, none = drawn(observe, tiny_stories, [1, 2, 1, None], sampler_type="TRTLLMSampler")
    assert first == again != second and none not in (first, second)
    first, _, again, _ = drawn(observe, tiny_stories, [1, 2, 1, 1])
    assert first != again
    first, second, again = drawn(observe, tiny_stories, [1, 2, 1], version="1.4.0rc0")
    assert first == again != second
