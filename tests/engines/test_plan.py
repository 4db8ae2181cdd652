"""What the plans of all backends derive alike, and what a plan is where a backend says nothing of its own."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.scripted.plan import ScriptedPlan
from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.engines.plan import common_facts, planned_length, planned_sequences
from djl_trtllm.model import inspect
from tests.engines.helpers import CONTEXT, CPU_ONLY, configured


@pytest.fixture
def plan(checkpoint: Path) -> ScriptedPlan:
    """Of the backend that has no engine."""
    made = plan_engine(configured(backend="scripted"), inspect(checkpoint), CPU_ONLY)
    assert isinstance(made, ScriptedPlan)
    return made


@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ({"max_rolling_batch_size": 7}, 7),
        ({"max_rolling_batch_size": 7, "max_num_sequences": 5}, 5),
        ({"max_rolling_batch_size": 5, "max_num_sequences": 7}, 5),
        ({"max_batch_size": 64}, 64),
        ({"max_batch_size": 8}, 8),
        ({"max_batch_size": 64, "max_rolling_batch_size": 16}, 16),
        ({"max_batch_size": 64, "max_num_tokens": 4096}, 64),
    ],
)
def test_as_many_sequences_run_as_both_limits_allow(options: dict[str, int], sequences: int) -> None:
    assert planned_sequences(configured(**options)) == sequences


@pytest.mark.parametrize(
    ("options", "length", "asked"),
    [
        ({"max_seq_len": 100}, 100, ""),
        ({"max_input_len": 100, "max_output_len": 50}, 150, ""),
        ({"max_input_len": CONTEXT - 1, "max_output_len": 1}, CONTEXT, ""),
        ({}, CONTEXT, ""),
        ({"max_seq_len": CONTEXT + 1}, CONTEXT, "option.max_seq_len"),
        ({"max_input_len": CONTEXT}, CONTEXT, "option.max_input_len"),
        ({"max_output_len": CONTEXT}, CONTEXT, "option.max_output_len"),
    ],
)
def test_a_sequence_is_at_most_the_models_context_and_who_asked_for_more_reads_why(
    checkpoint: Path, options: dict[str, int], length: int, asked: str
) -> None:
    notes: list[str] = []
    assert planned_length(configured(**options), inspect(checkpoint).shape, notes) == length
    assert len(notes) == bool(asked)
    for note in notes:
        assert f"{CONTEXT} tokens, the model's context" in note and asked in note


def test_facts_come_from_configuration_and_files(checkpoint: Path, tmp_path: Path) -> None:
    layout = inspect(checkpoint)
    config = configured(trust_remote_code="true", engine_cache_dir=tmp_path, stream_interval="4")
    facts = common_facts(config, layout)
    assert facts == {
        "source": checkpoint,
        "tokenizer_dir": checkpoint,
        "trust_remote_code": True,
        "engine_dir": None,
        "hash_store": tmp_path / "hashes",
        "stream_interval": 4,
    }


def test_a_backend_without_an_engine_has_nothing_to_compile_check_or_load(plan: ScriptedPlan, tmp_path: Path) -> None:
    manifest = cast("Manifest", None)  # nobody looks at it
    for attempt in (
        lambda: plan.compile_spec(tmp_path),
        lambda: plan.check_whole(tmp_path),
        lambda: plan.check_fit(tmp_path, manifest),
    ):
        with pytest.raises(ValueError, match="backend scripted"):
            attempt()
    assert plan.compiler is None
    assert (plan.build_options, plan.served_with, plan.versions, plan.gpus) == ({}, {}, {}, 0)
    assert plan.details() == ()


def test_a_plan_with_its_engine_is_another_plan(plan: ScriptedPlan, tmp_path: Path) -> None:
    assert plan.at(tmp_path).engine_dir == tmp_path
    assert plan.engine_dir is None


def test_only_a_checkpoint_with_code_of_its_own_needs_the_hub(checkpoint: Path) -> None:
    for trusted in (False, True):
        config = configured(backend="scripted", trust_remote_code=str(trusted).lower())
        assert plan_engine(config, inspect(checkpoint), CPU_ONLY).offline is not trusted


def test_the_log_has_backend_and_reason(plan: ScriptedPlan) -> None:
    assert plan.describe() == f"backend scripted: {plan.reason}"


def test_the_key_in_a_cache_depends_on_the_checkpoint(plan: ScriptedPlan, checkpoint: Path) -> None:
    before = plan.cache_key
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 2e-05'))
    after = plan_engine(configured(backend="scripted"), inspect(checkpoint), CPU_ONLY).cache_key
    assert before != after
