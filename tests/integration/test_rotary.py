"""The rotary options on the embedded engine: greedy output is that of transformers with the same config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from djl_trtllm import LLM, SamplingParams
from tests.support.prompts import SIXTEEN
from tests.support.reference import Reference

TOKENS = 16


def checkpoint(directory: Path, tiny_stories: Path, **config: object) -> Path:
    directory.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).symlink_to(tiny_stories / name)
    content = json.loads((tiny_stories / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.slow
def test_greedy_with_rotary_options_equals_transformers(tmp_path: Path, tiny_stories: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    other = Reference(checkpoint(tmp_path / "other", tiny_stories, rope_theta=500.0, rope_scaling=scaling))
    own = Reference(checkpoint(tmp_path / "own", tiny_stories))
    cache = tmp_path / "cache"
    with LLM(
        tmp_path / "own",
        engine_cache_dir=cache,
        rotary_base=500,
        rotary_scaling_type="linear",
        rotary_scaling_factor=2,
    ) as llm:
        outputs = llm.generate(SIXTEEN[:8], SamplingParams(max_tokens=TOKENS))
    ids = [output.outputs[0].token_ids for output in outputs]

    def said_by(reference: Reference) -> list[list[int]]:
        return [reference.greedy(reference.ids(prompt), TOKENS) for prompt in SIXTEEN[:8]]

    assert ids == said_by(other)
    assert ids != said_by(own)
