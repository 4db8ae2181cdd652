"""What does not fit is refused with a message, and the engine goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from djl_trtllm.model import Tokenizer
from tests.support.server import Server
from tests.trtllm.conftest import START_SECONDS, Installation, MakeModel, ask, run_cli, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]

WORD = " wolf"


def prompt_of(tokenizer: Tokenizer, tokens: int) -> str:
    """A prompt of exactly this number of tokens."""
    text = "the"
    while len(tokenizer.encode(text)) < tokens:
        text += WORD
    assert len(tokenizer.encode(text)) == tokens
    return text


def test_the_longest_prompt_is_answered_and_a_longer_one_refused(server: Server, tokenizer: Tokenizer) -> None:
    assert ask(server, prompt_of(tokenizer, 512), max_new_tokens=4).status_code == 200
    refused = ask(server, prompt_of(tokenizer, 513), max_new_tokens=4)
    assert refused.status_code == 424
    assert "513 tokens, max_input_len is 512" in refused.json()["error"]
    assert ask(server, "the wolf", max_new_tokens=4).status_code == 200


def test_the_longest_sequence_is_answered_and_a_longer_one_refused(server: Server, tokenizer: Tokenizer) -> None:
    room = 1536 - 512
    answer = ask(server, prompt_of(tokenizer, 512), max_new_tokens=room, ignore_eos_token=True, details=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["details"]["generated_tokens"] == room
    refused = ask(server, prompt_of(tokenizer, 512), max_new_tokens=room + 1)
    assert refused.status_code == 424
    assert "1025 new tokens, max_output_len is 1024" in refused.json()["error"]


def test_more_sequences_than_the_engine_was_compiled_for_are_lowered_to_its_own(
    installation: Installation, compiled: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(compiled, engine)
    properties = engine / "serving.properties"
    properties.write_text(properties.read_text() + "option.max_rolling_batch_size=4\noption.max_num_sequences=4\n")
    result = run_cli(installation, "config", str(engine))
    assert (result.returncode, "max_num_sequences" in result.stdout + result.stderr) == (0, True)
    with serving(installation, engine) as server:
        assert ask(server, "the wolf", max_new_tokens=4).status_code == 200


def test_fewer_sequences_than_the_engine_was_compiled_for_are_run(
    installation: Installation, compiled: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(compiled, engine)
    lines = [
        line
        for line in (engine / "serving.properties").read_text().splitlines()
        if not line.startswith(("option.max_rolling_batch_size", "option.max_num_sequences"))
    ]
    (engine / "serving.properties").write_text("\n".join([*lines, "option.max_rolling_batch_size=1", ""]))
    with serving(installation, engine) as server:
        assert ask(server, "the wolf", max_new_tokens=4).status_code == 200


def test_a_checkpoint_with_chunks_takes_prompts_beyond_an_iteration(
    installation: Installation, make_model: MakeModel, tokenizer: Tokenizer
) -> None:
    """PyTorch without chunked prefill refuses prompts above max_num_tokens; with it they are split."""
    model = make_model("pytorch", max_num_tokens=256, max_input_len=512, enable_chunked_context="true")
    with serving(installation, model) as server:
        answer = ask(server, prompt_of(tokenizer, 500), max_new_tokens=4)
        assert answer.status_code == 200, answer.text
