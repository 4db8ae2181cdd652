"""Fourteen architectures: a checkpoint is compiled for OpenVINO and served, and its greedy output is transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from djl_trtllm.backends.compilation import compile_checkpoint
from djl_trtllm.engines import build
from djl_trtllm.model import load_tokenizer
from tests.engines.helpers import configured
from tests.support.architectures import ARCHITECTURES, greedy, write_checkpoint
from tests.support.client import lmi
from tests.support.models import scripted_model
from tests.support.server import Server, serving

QUICK = "qwen2"
NEW_TOKENS = 16
PROMPTS = ("the little red riding hood", "the wood", "hood hood the riding into", "w")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server to register models in: starting one for each architecture takes longer than all of them."""
    first = scripted_model(tmp_path_factory.mktemp("first") / "model", {"steps_per_second": 100})
    with serving(first, SERVING_MODEL_STORE=str(store)) as started:
        yield started


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler runs in this process: importing torch in a new one takes longer than compiling."""
    from djl_trtllm.backends.openvino.compile import compile_engine

    def run(self: build._Run) -> None:
        from djl_trtllm.backends.openvino.compiler import OpenVinoSpec

        compile_engine(OpenVinoSpec.load(Path(self.command[-1])))

    monkeypatch.setattr(build._Run, "to_its_end", run)


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_greedy_output_is_that_of_transformers(model_type: str, server: Server, store: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model_type)
    compile_checkpoint(configured(max_rolling_batch_size=4), checkpoint, store / model_type)
    tokenizer = load_tokenizer(checkpoint)
    expected = greedy(checkpoint, [tokenizer.encode(prompt) for prompt in PROMPTS], NEW_TOKENS)
    answer = server.http.post("/models", params={"url": model_type})
    assert answer.status_code == 200, answer.text
    try:
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            request = lmi(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, details=True, ignore_eos_token=True)
            answer = server.http.post(f"/predictions/{model_type}", json=request)
            assert answer.status_code == 200, answer.text
            generated = [token["id"] for token in answer.json()["details"]["tokens"]]
            assert len(generated) == NEW_TOKENS
            assert generated[: wanted.certain] == wanted.tokens[: wanted.certain]
    finally:
        server.http.delete(f"/models/{model_type}")
    # Tokens of one kind, or those after a tie, would say nothing.
    assert sum(wanted.certain for wanted in expected) >= NEW_TOKENS * len(PROMPTS) / 2
    assert len({token for wanted in expected for token in wanted.tokens}) >= 8
