"""Requests for an engine that runs every request with one number of beams, or with a limited one (`Limits`)."""

from __future__ import annotations

from msgspec.structs import replace

from djl_trtllm.errors import UnsupportedParameterError
from djl_trtllm.request import GenerationRequest

_WITH_A_GUIDE = (
    "a guide with beams: no engine constrains beams; leave out the guide or 'num_beams' "
    "(the PyTorch backend of TensorRT-LLM runs every request with option.max_beam_width beams)"
)


def with_beams_of(request: GenerationRequest, beams: int, most_beams: int = 0) -> GenerationRequest:
    """The request as an engine with these `Limits` runs it: one without beams gets `beams`, the best are returned.

    Raises UnsupportedParameterError, naming the parameters that cannot be honoured with beams.
    """
    sampling = request.sampling
    if beams and sampling.beam_width != beams:
        if problems := _problems(request, beams):
            raise UnsupportedParameterError(
                f"this engine runs every request with {beams} beams (option.max_beam_width): {'; '.join(problems)}"
            )
        request = replace(request, sampling=replace(sampling, beam_width=beams, best_of=None))
    if most_beams and request.sampling.beam_width > most_beams:
        raise UnsupportedParameterError(
            f"'num_beams' ('beam_width') is {sampling.beam_width}, expected at most {most_beams}: this engine is "
            "compiled for that many (option.max_beam_width)"
        )
    if request.guide is not None and request.sampling.beam_width > 1:
        raise UnsupportedParameterError(_WITH_A_GUIDE)
    return request


def _problems(request: GenerationRequest, beams: int) -> list[str]:
    sampling = request.sampling
    found = []
    if sampling.beam_width > 1:
        found.append(f"'num_beams' ('beam_width') is {sampling.beam_width}, expected {beams}, or none")
    elif sampling.sequences > beams:
        found.append(f"'n' or 'best_of' is {sampling.sequences}, expected at most {beams}")
    if sampling.do_sample:
        found.append(
            "beams are not sampled, send 'do_sample': false or 'temperature': 0 (chat requests sample by default)"
        )
    return found
