"""What a service makes of a request for its engine: the beams that it wants, the seeds that it ignores."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from djl_trtllm.api import Call
from djl_trtllm.errors import UnsupportedParameterError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, Sampling
from djl_trtllm.service import ModelService
from tests.support.in_process import Asked, Hosts, loaded
from tests.support.virtual_time import in_virtual_time
from tests.support.word_encoder import WordEncoder

OWN = ("X-Own", "1")


async def limited(hosts: Hosts, tokenizer: Tokenizer, **limits: object) -> ModelService:
    """A service whose engine has these limits."""
    service = await loaded(tokenizer)
    hosts.last.limits = replace(hosts.last.limits, **limits)
    hosts.last.features |= {"beam_width"}
    return service


def call(**sampling: object) -> Call:
    request = GenerationRequest(prompt="a wolf", sampling=Sampling(**sampling))  # type: ignore[arg-type]
    return Call((request,), WordEncoder(), (OWN,))


@in_virtual_time
async def test_a_plain_request_has_the_beams_of_its_engine(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await limited(hosts, tokenizer, beams=3)
    await service.generate(call(), Asked())
    assert [message.sampling.beam_width for message in hosts.last.submitted] == [3]
    assert service.load_now == 3
    with pytest.raises(UnsupportedParameterError, match="runs every request with 3 beams"):
        await service.generate(call(beam_width=2), Asked())
    await service.close()


@in_virtual_time
async def test_a_seed_that_the_engine_ignores_is_warned_of_in_the_response(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await limited(hosts, tokenizer, seeded=False)
    own, (name, warning) = service.with_warnings(call(do_sample=True, seed=3)).headers
    assert (own, name) == (OWN, "Warning")
    assert warning == '299 djl-trtllm "the engine ignores the seed of this request (option.ignored_seed=warn)"'
    for others in (call(do_sample=True), call(seed=3), call()):
        assert service.with_warnings(others) is others
    await service.close()
    assert service.with_warnings(call(do_sample=True, seed=3)).headers == (OWN,)


@in_virtual_time
async def test_nothing_is_said_where_the_engine_takes_seeds(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await limited(hosts, tokenizer)
    seeded = call(do_sample=True, seed=3)
    assert service.with_warnings(seeded) is seeded
    await service.close()
