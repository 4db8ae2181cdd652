"""An engine that runs every request with one number of beams."""

from __future__ import annotations

import pytest

from djl_trtllm.batching.beams import with_beams_of
from djl_trtllm.errors import UnsupportedParameterError
from djl_trtllm.request import GenerationRequest, Guide, GuideKind, Sampling

GUIDE = Guide(GuideKind.REGEX, "a+")
ALL = "this engine runs every request with 4 beams (option.max_beam_width): "
SAMPLED = "beams are not sampled, send 'do_sample': false or 'temperature': 0 (chat requests sample by default)"


def asking(guide: Guide | None = None, **sampling: object) -> GenerationRequest:
    return GenerationRequest(prompt="a", guide=guide, sampling=Sampling(**sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 3, 4])
def test_a_request_without_beams_gets_the_engines_and_its_best_are_returned(n: int) -> None:
    assert with_beams_of(asking(n=n, max_new_tokens=7), 4) == asking(n=n, max_new_tokens=7, beam_width=4)
    assert with_beams_of(asking(n=n, best_of=4), 4) == asking(n=n, beam_width=4)


def test_a_request_with_that_many_is_left_as_it_is() -> None:
    request = asking(beam_width=4, n=2, length_penalty=0.5)
    assert with_beams_of(request, 4) is request


@pytest.mark.parametrize("request_", [asking(), asking(do_sample=True), asking(beam_width=3), asking(GUIDE)])
def test_an_engine_without_a_number_of_its_own_leaves_requests_as_they_are(request_: GenerationRequest) -> None:
    assert with_beams_of(request_, 0) is request_


@pytest.mark.parametrize(
    ("request_", "problems"),
    [
        (asking(beam_width=3), "'num_beams' ('beam_width') is 3, expected 4, or none"),
        (asking(n=5), "'n' or 'best_of' is 5, expected at most 4"),
        (asking(best_of=5), "'n' or 'best_of' is 5, expected at most 4"),
        (asking(do_sample=True), SAMPLED),
        (asking(do_sample=True, n=5), f"'n' or 'best_of' is 5, expected at most 4; {SAMPLED}"),
    ],
)
def test_what_cannot_be_run_with_that_many_beams_is_refused_with_the_reason(
    request_: GenerationRequest, problems: str
) -> None:
    with pytest.raises(UnsupportedParameterError) as refused:
        with_beams_of(request_, 4)
    assert str(refused.value) == ALL + problems


@pytest.mark.parametrize("width", [1, 2, 4])
def test_an_engine_with_a_limit_runs_as_many_beams_as_asked(width: int) -> None:
    assert with_beams_of(asking(beam_width=width), 0, 4) == asking(beam_width=width)


def test_more_beams_than_an_engine_is_compiled_for_are_refused_with_both_numbers() -> None:
    with pytest.raises(UnsupportedParameterError) as refused:
        with_beams_of(asking(beam_width=5), 0, 4)
    assert str(refused.value) == (
        "'num_beams' ('beam_width') is 5, expected at most 4: this engine is compiled for that many "
        "(option.max_beam_width)"
    )


@pytest.mark.parametrize(("request_", "beams"), [(asking(GUIDE), 4), (asking(GUIDE, beam_width=4), 4)])
def test_a_guide_is_refused_with_beams(request_: GenerationRequest, beams: int) -> None:
    for engine in (beams, 0) if request_.sampling.beam_width > 1 else (beams,):
        with pytest.raises(UnsupportedParameterError, match="a guide with beams: no engine constrains beams"):
            with_beams_of(request_, engine)
