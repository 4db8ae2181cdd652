"""What TensorRT-LLM itself fails, and this server keeps from it: the fake is as unkind as the installed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import write_adapter
from tests.trtllm.conftest import START_SECONDS, Installation, MakeModel, ask, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]

PACKAGES = ("xgrammar", "llguidance")
"""Packages that compile guides."""


def seen(installation: Installation, case: str, model: Path, adapter: Path | None = None) -> Any:
    environ = {**os.environ, **installation.environ, "PATIENCE": "2" if installation.is_fake else "60"}
    command = [sys.executable, "-m", "tests.trtllm.failing_program", case, str(model), str(adapter)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=START_SECONDS)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.rstrip().rsplit("\n", 1)[-1])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_guide_that_cannot_be_compiled_is_the_error_of_its_request(
    installation: Installation, make_model: MakeModel, package: str
) -> None:
    answers = seen(installation, package, make_model("pytorch"))
    assert "Guided decoding error" in answers["own"]
    assert (answers["other"], answers["after"]) == ("length", "length")


def test_a_token_that_the_model_does_not_have_is_the_error_of_its_request(
    installation: Installation, make_model: MakeModel
) -> None:
    answers = seen(installation, "token", make_model("pytorch"))
    assert answers == {"own": "RequestError: Token ID out of range", "after": "length"}


def test_an_abort_before_the_first_log_probability(installation: Installation, make_model: MakeModel) -> None:
    """Whether it can be read: it depends on the iteration in which the abort arrives."""
    answers = seen(installation, "abort", make_model("pytorch"))
    assert answers["own"] == "cancelled" or "cum_log_probs" in answers["own"]
    assert answers["after"] == "length"


def test_an_adapter_without_weights_is_the_end_of_the_worker(
    installation: Installation, make_model: MakeModel, tmp_path: Path
) -> None:
    (write_adapter(tmp_path / "bare") / "adapter_model.safetensors").unlink()
    answers = seen(installation, "adapter", make_model("pytorch"), tmp_path / "bare")
    assert answers["worker"] == "ended"
    assert not answers["own"].startswith("RequestError")


@pytest.mark.parametrize("package", PACKAGES)
def test_guides_and_adapters_that_cannot_be_used_never_reach_it(
    installation: Installation, make_model: MakeModel, package: str
) -> None:
    model = make_model("pytorch", enable_lora="true", max_lora_rank=8, guided_decoding_backend=package)
    write_adapter(model / "adapters" / "good")
    (write_adapter(model / "adapters" / "bare") / "adapter_model.safetensors").unlink()
    with serving(installation, model) as server:
        refused = ask(server, "a wolf", max_new_tokens=4, guided_regex="(")
        assert refused.status_code == 424
        assert "the guide cannot be used" in refused.text
        assert ask(server, "a wolf", max_new_tokens=4, adapters="good").status_code == 200
        answer = ask(server, "a wolf", max_new_tokens=4, adapters="bare")
        assert "holds no weights of an adapter" in answer.text
        assert ask(server, "a wolf", max_new_tokens=4).status_code == 200
