"""Seeds: of the C++ sampler, and of the PyTorch backend's own from some version on; before, refused or warned of."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version

from tests.support.server import Server
from tests.trtllm.conftest import START_SECONDS, Installation, MakeModel, ask, serving, takes_seeds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 24, "details": True}
PROMPT = "once upon a time a little girl went into the dark wood to see her grandmother. there she met a wolf"


def ids(server: Server, seed: int) -> list[int]:
    return server.token_ids(PROMPT, seed=seed, **SAMPLED)


def test_1_2_has_no_seeds_of_requests_on_pytorch(installation: Installation) -> None:
    """Which release was the first to have them was not seen."""
    assert not takes_seeds(installation) or Version(installation.version) >= Version("1.3.0rc0")


def test_a_seed_decides_or_is_refused(installation: Installation, server: Server, backend: str) -> None:
    """Outputs of requests that run alone: see `seed_manager.py` in TensorRT-LLM."""
    if backend == "tensorrt" or takes_seeds(installation):
        assert ids(server, 7) == ids(server, 7) != ids(server, 8)
        return
    refused = ask(server, PROMPT, seed=7, **SAMPLED)
    assert refused.status_code == 424
    assert "'seed': this engine's sampler ignores it" in refused.json()["error"]
    assert ask(server, PROMPT, **SAMPLED).status_code == 200
    assert ask(server, PROMPT, seed=7, max_new_tokens=4).status_code == 200  # greedy


def test_by_option_a_seed_that_is_ignored_is_answered_with_a_warning(
    installation: Installation, make_model: MakeModel
) -> None:
    with serving(installation, make_model("pytorch", ignored_seed="warn", tgi_compat="true")) as server:
        answer = ask(server, PROMPT, seed=7, **SAMPLED)
        assert answer.status_code == 200, answer.text
        (result,) = answer.json()
        if takes_seeds(installation):
            assert (result["details"]["seed"], "warning" in answer.headers) == (7, False)
        else:
            assert result["details"]["seed"] is None
            assert "the engine ignores the seed" in answer.headers["warning"]
        assert "warning" not in ask(server, PROMPT, **SAMPLED).headers
        assert "warning" not in ask(server, PROMPT, seed=7, max_new_tokens=4).headers


def test_the_c_sampler_takes_seeds_on_pytorch(installation: Installation, make_model: MakeModel) -> None:
    if Version(installation.version) >= Version("1.4.0rc0"):
        pytest.skip("TRTLLMSampler is removed")
    with serving(installation, make_model("pytorch", sampler_type="TRTLLMSampler")) as server:
        assert ids(server, 7) == ids(server, 7) != ids(server, 8)
