"""A draft model is checked before anything is loaded, and has a plan, an engine and memory of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from djl_trtllm.backends.openvino.backend import OpenVinoPlan
from djl_trtllm.commands.size_request import read_request
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.service.model import ModelSource, plan
from djl_trtllm.sizing.machines import of_gpu
from djl_trtllm.sizing.recommendation import DEFAULT_LMI
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine, write_checkpoint


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A model of the size and vocabulary of the tiny checkpoint, with other weights."""
    return write_checkpoint(tmp_path / "draft", seed=3)


def planned(checkpoint: Path, hardware: Hardware = CPU_ONLY, **options: object) -> EnginePlan:
    return plan(ModelSource("model", checkpoint, configured(**options)), hardware)[2]


def refused(checkpoint: Path, hardware: Hardware = CPU_ONLY, **options: object) -> str:
    with pytest.raises(DjlTrtllmError) as caught:
        planned(checkpoint, hardware, **options)
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value).splitlines()[-1]


MACHINES = [
    ("openvino", CPU_ONLY),
    ("pytorch", gpu_machine()),
    ("vllm", Hardware(gpus=gpu_machine().gpus, tensorrt_llm=None, available_memory=8 * 10**9, vllm="0.32.0")),
]


@pytest.mark.parametrize(("backend", "hardware"), MACHINES, ids=[name for name, _ in MACHINES])
def test_a_draft_that_cannot_be_one_is_one_line(
    checkpoint: Path, draft: Path, tmp_path: Path, backend: str, hardware: Hardware
) -> None:
    asked = {"backend": backend, "speculative_draft_model": str(draft)}
    planned(checkpoint, hardware, **asked)
    absent = refused(checkpoint, hardware, **{**asked, "speculative_draft_model": str(tmp_path / "absent")})
    assert "absent is not a directory on this machine" in absent and "option.speculative_draft_model=" in absent
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    swapped = {token: id_ for id_, token in enumerate(sorted(tokenizer["model"]["vocab"], reverse=True))}
    tokenizer["model"]["vocab"] = swapped
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    other = refused(checkpoint, hardware, **asked)
    assert "has another vocabulary than" in other and "in the model; take one of the same family" in other
    weights = load_file(draft / "model.safetensors")
    weights["more.weight"] = np.ones((256, 64), np.float16)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    assert "of weights, more than the " in refused(checkpoint, hardware, **asked)


def test_without_tokenizers_the_sizes_of_the_vocabularies_are_compared(checkpoint: Path, draft: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    (draft / "tokenizer.json").unlink()
    planned(checkpoint, speculative_draft_model=str(draft))
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    found = refused(checkpoint, speculative_draft_model=str(draft))
    assert f"it has {config['vocab_size'] + 64} tokens, and the model {config['vocab_size']}" in found


def test_a_draft_for_the_cpu_is_compiled_by_itself_and_takes_part_of_the_memory(checkpoint: Path, draft: Path) -> None:
    alone, both = planned(checkpoint), planned(checkpoint, speculative_draft_model=str(draft), speculative_length=3)
    assert isinstance(alone, OpenVinoPlan) and isinstance(both, OpenVinoPlan) and isinstance(both.draft, OpenVinoPlan)
    # It has the key that it would have if it was served itself, so one engine is for all models that it drafts for.
    itself = planned(draft)
    assert (both.cache_key, both.draft.cache_key) == (alone.cache_key, itself.cache_key)
    assert alone.cache_key != itself.cache_key
    assert alone.kv_cache is not None and both.kv_cache is not None
    assert both.kv_cache.block_bytes == 2 * (alone.kv_cache.block_bytes or 0)
    loaded = replace(both, draft=both.draft.at(draft)).at(checkpoint)
    assert isinstance(loaded, OpenVinoPlan)
    options = loaded.executor_options()
    assert (options["draft_tokens"], options["draft_dir"]) == (3, str(draft)) and not options["enable_prefix_caching"]
    # A step reads a whole prompt, and verifies three tokens of each sequence.
    assert options["max_num_batched_tokens"] == alone.max_seq_len + 4 * alone.max_sequences


def test_prompts_are_scored_where_the_model_fits_twice_beside_its_draft(checkpoint: Path, draft: Path) -> None:
    weights = (checkpoint / "model.safetensors").stat().st_size
    few: dict[str, Any] = {"max_tokens_in_paged_kv_cache": 64}
    found = {}
    for times in (2, 6, 12):
        machine = replace(CPU_ONLY, available_memory=times * weights + 40_000)
        plans = [planned(checkpoint, machine, **few, **more) for more in ({}, {"speculative_draft_model": str(draft)})]
        found[times] = [isinstance(each, OpenVinoPlan) and each.scores_prompts for each in plans]
    assert found == {2: [False, False], 6: [True, False], 12: [True, True]}


def test_steps_that_cannot_hold_a_prompt_and_its_draft_are_refused(checkpoint: Path, draft: Path) -> None:
    found = refused(checkpoint, speculative_draft_model=str(draft), max_num_tokens=300)
    assert found.strip().startswith("- option.max_num_tokens=300 ") and "expected at least 1536" in found
    plan = planned(checkpoint, speculative_decoding_mode="ngram", max_num_tokens=300)
    assert isinstance(plan, OpenVinoPlan) and plan.max_num_batched_tokens == 300


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculative_decoding_mode": "mtp"}, "OpenVINO has no speculation with mtp: it has ngram, draft_model"),
        ({"speculative_config": "{method: ngram, is_keep_all: true}"}, "OpenVINO has no is_keep_all; leave it out"),
    ],
)
def test_what_an_engine_lacks_is_refused_by_name(checkpoint: Path, options: dict[str, Any], said: str) -> None:
    assert said in refused(checkpoint, **options)


def test_the_engines_get_the_directory_of_the_draft(checkpoint: Path, draft: Path) -> None:
    asked = {"speculative_draft_model": str(draft), "speculative_length": 5}
    pytorch = planned(checkpoint, gpu_machine(), backend="pytorch", **asked).executor_options()["arguments"]
    assert pytorch["speculative_config"] == {
        "class": "DraftTargetDecodingConfig",
        "max_draft_len": 5,
        "speculative_model_dir": str(draft),
    }
    vllm = planned(checkpoint, MACHINES[2][1], backend="vllm", **asked).executor_options()["arguments"]
    assert vllm["speculative_config"] == {"model": str(draft), "num_speculative_tokens": 5}


def test_the_size_of_a_model_has_its_draft(checkpoint: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = of_gpu("H100")
    alone = read_request(str(checkpoint), {}, DEFAULT_LMI).on(machine, 1)
    monkeypatch.setenv("OPTION_SPECULATIVE_DRAFT_MODEL", str(draft))
    both = read_request(str(checkpoint), {}, DEFAULT_LMI).on(machine, 1)
    assert both.estimate.weights == 2 * alone.estimate.weights > 0
