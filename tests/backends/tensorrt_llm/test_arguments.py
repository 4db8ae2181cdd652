"""The exact arguments that reach TensorRT-LLM, or the exact message; the table of its names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from packaging.version import Version

from djl_trtllm.backends.effects import Derived, Effect, Passed, Target, has_effect
from djl_trtllm.backends.extra_options import choices
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.tensorrt_llm.arguments import ENGINE, LLM_OWNERS, PYTORCH
from djl_trtllm.backends.tensorrt_llm.names import (
    KNOWN_VERSIONS,
    Member,
    all_members,
    default_of,
    has,
    members,
    module_of,
    owners,
)
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtEnginePlan, TensorRtLlmPlan
from djl_trtllm.config import Backend
from djl_trtllm.config.options import OPTIONS, find
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.model import inspect
from tests.backends.tensorrt_llm.kit import CASES, building, changed, engine_planned, flat, planned, problems, running
from tests.engines.helpers import configured, gpu_machine
from tests.fakes.installation import fake_tensorrt_llm
from tests.support.tables import by_rows, by_table, table

DEFAULTS = {"LLM.gather_generation_logits"}
"""Of those that a case names and that are passed anyway."""
TOGETHER = set(table(__file__, "options_with_others"))
"""Options that mean something with others only, and have tests of their own."""


# -- what is passed when nothing is set ------------------------------------------------------------------------------


@by_table("backend", "version", "built", "run")
def test_what_is_passed_by_default(
    roomy: Path, backend: str, version: str, built: dict[str, Any], run: dict[str, Any]
) -> None:
    """1.0 knows the size of blocks of an engine only, and has no guides beside PyTorch's overlap scheduler."""
    plan = planned(roomy, version, backend=backend)
    assert flat(plan.running) == run
    assert (flat(plan.building) if isinstance(plan, TensorRtEnginePlan) else {}) == built


@by_rows("version", KNOWN_VERSIONS)
@by_rows("backend", ["pytorch", "autodeploy"])
def test_what_is_passed_by_default_every_version_has(roomy: Path, version: str, backend: str) -> None:
    if members(LLM_OWNERS[Backend(backend)], version):
        planned(roomy, version, backend=backend)
    else:
        with pytest.raises(EngineError, match=f"TensorRT-LLM {version} has no such backend"):
            planned(roomy, version, backend=backend)


# -- every option ----------------------------------------------------------------------------------------------------


def passed(model: Path, backend: str, **options: object) -> dict[str, dict[str, Any]]:
    """All arguments of a backend, as a case has them."""
    if backend == "pytorch":
        return {"pytorch": running(model, backend="pytorch", **options)}
    plan = engine_planned(model, **options)
    return {"building": flat(plan.building), "running": flat(plan.running)}


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_an_option_becomes_exactly_these_arguments(roomy: Path, backend: str) -> None:
    before, wrong = passed(roomy, backend), []
    for case in CASES:
        if (case.option, backend) == ("quantize", "pytorch"):
            continue  # refused: test_tensorrt_llm_quantization.py
        for phase, arguments in passed(roomy, backend, **{case.option: case.value}).items():
            found, expected = changed(before[phase], arguments), getattr(case, phase)
            if found != expected:
                wrong.append((case.option, phase, found, expected))
    assert wrong == []


def test_every_option_with_an_effect_has_a_case() -> None:
    cases = {declared.name for case in CASES if (declared := find(f"option.{case.option}")) is not None}
    assert len(cases) == len(CASES)
    effective = {
        declared.name
        for declared in OPTIONS.values()
        for effects in (ENGINE, PYTORCH)
        if declared.name in effects and has_effect(declared, effects)
    }
    assert effective - cases - TOGETHER == set()
    assert effective >= TOGETHER


def test_an_effect_that_is_arguments_only_says_the_truth() -> None:
    untrue = []
    for case in CASES:
        declared = find(f"option.{case.option}")
        assert declared is not None
        for effects, passed in ((ENGINE, case.building | case.running), (PYTORCH, case.pytorch)):
            effect = effects.get(declared.name)
            named = (
                {f"{target.owner}.{target.name}" for target in effect.targets} if isinstance(effect, Passed) else set()
            )
            if not named <= passed.keys() | DEFAULTS:
                untrue.append((case.option, effect))
    assert untrue == []


# -- options together ------------------------------------------------------------------------------------------------


class Together(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that are set together: what they change in building and running, or parts of the problem that they are.

    The first option is the one that the problem names.
    """

    options: dict[str, Any]
    backend: str = "tensorrt"
    version: str = "1.2.1"
    building: dict[str, Any] = {}
    running: dict[str, Any] = {}
    problem: list[str] | None = None


TOGETHER_CASES = msgspec.json.decode(Path(__file__).with_name("together.json").read_bytes(), type=list[Together])


@by_rows("case", [case for case in TOGETHER_CASES if case.problem is None])
def test_options_together_become_exactly_these_arguments(roomy: Path, case: Together) -> None:
    before, after = (planned(roomy, case.version, backend=case.backend, **options) for options in ({}, case.options))
    assert changed(flat(before.running), flat(after.running)) == case.running
    if isinstance(before, TensorRtEnginePlan) and isinstance(after, TensorRtEnginePlan):
        assert changed(flat(before.building), flat(after.building)) == case.building


@by_rows("case", [case for case in TOGETHER_CASES if case.problem is not None])
def test_what_tensorrt_llm_does_not_take_is_refused_when_planning(roomy: Path, case: Together) -> None:
    (problem,) = problems(roomy, case.version, backend=case.backend, **case.options)
    name, value = next(iter(case.options.items()))
    assert problem.startswith(f"option.{name}={value} (environment variable OPTION_{name.upper()})")
    assert [part for part in case.problem or () if part not in problem] == []


def test_beams_that_fit_the_batch_and_adapters_of_a_checkpoint_are_planned(roomy: Path) -> None:
    planned(roomy, backend="pytorch", max_rolling_batch_size=5, max_beam_width=5)
    planned(roomy, backend="tensorrt", max_rolling_batch_size=4, max_beam_width=5)
    planned(roomy, backend="pytorch", enable_lora="true")
    assert "LLM.guided_decoding_backend" not in running(roomy, backend="autodeploy")
    assert planned(roomy, max_rolling_batch_size=16, max_num_sequences=64).max_sequences == 16


LORA = {"enable_lora": "true", "lora_target_modules": "attn_q,attn_v"}
ADAPTER_OPTIONS = {
    "max_lora_rank": ("16", "LoraConfig.max_lora_rank", 16),
    "lora_dir": ("/adapters/one", "LoraConfig.lora_dir", ["/adapters/one"]),
    "lora_ckpt_source": ("nemo", "LoraConfig.lora_ckpt_source", "nemo"),
    "lora_cache_optimal_adapter_size": ("16", "PeftCacheConfig.optimal_adapter_size", 16),
    "lora_cache_max_adapter_size": ("128", "PeftCacheConfig.max_adapter_size", 128),
    "lora_cache_gpu_memory_fraction": ("0.1", "PeftCacheConfig.device_cache_percent", 0.1),
    "lora_cache_host_memory_bytes": ("1000", "PeftCacheConfig.host_cache_size", 1000),
}
"""Option: value, argument, what it becomes. Without option.enable_lora they reach nothing."""


def test_a_prompt_that_no_iteration_holds_is_refused_at_admission(roomy: Path) -> None:
    options: dict[str, object] = {"backend": "pytorch", "max_num_tokens": 512}
    assert planned(roomy, **options).max_input_len == 512
    assert planned(roomy, **options, max_input_len=4096).max_input_len == 512
    assert planned(roomy, **options, max_input_len=4096, enable_chunked_prefill="true").max_input_len == 4096


# -- guides and adapters ---------------------------------------------------------------------------------------------


def test_an_adapter_option_becomes_its_argument_where_adapters_are_served(roomy: Path) -> None:
    with_adapters = running(roomy, backend="pytorch", **LORA)
    without = running(roomy, backend="pytorch")
    for name, (value, target, becomes) in ADAPTER_OPTIONS.items():
        served = running(roomy, backend="pytorch", **LORA, **{name: value})
        assert changed(with_adapters, served) == {target: becomes}, name
        assert changed(without, running(roomy, backend="pytorch", **{name: value})) == {}, name


def test_adapters_of_a_checkpoint_have_a_configuration_of_their_own(roomy: Path) -> None:
    arguments = planned(roomy, backend="pytorch", **LORA, lora_dir="/adapters/one").running
    assert arguments["lora_config"] == {
        "class": "LoraConfig",
        "lora_dir": ["/adapters/one"],
        "lora_target_modules": ["attn_q", "attn_v"],
        "max_lora_rank": 64,
    }
    assert arguments["peft_cache_config"] == {"class": "PeftCacheConfig", "device_cache_percent": 0.05}


@pytest.mark.parametrize(
    ("quantize", "offline"), [("none", True), ("int8", True), ("int4", True), ("awq", False), ("fp8", False)]
)
def test_samples_for_a_calibration_come_from_the_hub(roomy: Path, quantize: str, offline: bool) -> None:
    assert planned(roomy, quantize=quantize).offline is offline
    assert planned(roomy, quantize=quantize, calib_dataset=roomy).offline is True


def quantised(roomy: Path, to: Path, **config: object) -> Path:
    shutil.copytree(roomy, to)
    (to / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    return to


def test_a_checkpoint_that_is_quantised_so_already_is_taken_as_it_is(roomy: Path, tmp_path: Path) -> None:
    path = quantised(roomy, tmp_path / "m", quant_algo="FP8", kv_cache_quant_algo="FP8")
    assert building(path, quantize="fp8") == building(path) == building(roomy)
    assert planned(path, quantize="fp8").offline
    assert running(path, backend="pytorch", quantize="fp8") == running(path, backend="pytorch")
    assert planned(path).describe().endswith("weights in FP8")


def test_a_checkpoint_that_is_quantised_otherwise_is_refused(roomy: Path, tmp_path: Path) -> None:
    path = quantised(roomy, tmp_path / "m", quant_algo="NVFP4")
    for backend in ("tensorrt", "pytorch"):
        (problem,) = problems(path, backend=backend, quantize="fp8")
        assert problem == (
            "option.quantize=fp8 (environment variable OPTION_QUANTIZE): the checkpoint is quantised already, with "
            "NVFP4; leave the option out, or take a checkpoint that is not"
        )


# -- what each option becomes on TensorRT-LLM: a field that is really there, or a reason why it has  -------------------


VERSION = "1.2.1"


def targets(effect: Effect | None) -> tuple[Target, ...]:
    return effect.targets if isinstance(effect, Passed | Derived) else ()


def test_every_target_is_a_field_that_tensorrt_llm_has() -> None:
    found = [
        (name, f"LLM.{backend}" if target.owner == "LLM" else target.owner, target.name)
        for backend, effects in (("tensorrt", ENGINE), ("pytorch", PYTORCH))
        for name, effect in effects.items()
        for target in targets(effect)
    ]
    assert len(found) > 200
    assert [target for target in found if not has(target[1], target[2], VERSION)] == []


# -- docs/tensorrt-llm.md ----------------------------------------------------------------------------------------------


def test_the_page_says_which_arguments_options_become() -> None:
    """A cell names one of the arguments, or none where there is no effect; the second may be "the same"."""
    page = (Path(__file__).parents[3] / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")
    wrong, seen = [], 0
    for line in page.splitlines():
        key, *cells = (cell.strip(" `") for cell in line.strip("|").split(" | "))
        declared = find(key)
        if declared is None or len(cells) < 2:
            continue
        seen += 1
        for effects, cell in ((ENGINE, cells[0]), (PYTORCH, cells[0] if cells[1] == "the same" else cells[1])):
            effect = effects.get(declared.name)
            named = {str(target) for target in targets(effect)}
            is_argument = re.fullmatch(r"LLM\(\w+\)|\w+Config\.\w+", cell) is not None
            if (is_argument and cell not in named) or (cell == "none" and named):
                wrong.append((key, cell, effect))
    assert seen > 20
    assert wrong == []


ENGINE_BACKEND = ("LLM.tensorrt", "BuildConfig", "PluginConfig", "KVCacheType")


def rows_of_one_name() -> list[list[Member]]:
    grouped: dict[tuple[str, str], list[Member]] = defaultdict(list)
    for row in all_members():
        grouped[row.owner, row.name].append(row)
    return list(grouped.values())


# -- rows --------------------------------------------------------------------------------------------------------------


def test_every_row_has_an_owner_a_type_and_its_evidence() -> None:
    for row in all_members():
        assert row.owner in owners() and row.type, row
        assert row.evidence.startswith(("read ", "documented", "inferred")), row
        assert row.kind != "method" or row.type == "method", row


def test_rows_of_one_name_do_not_overlap_and_leave_no_gap() -> None:
    pairs = [pair for rows in rows_of_one_name() for pair in pairwise(rows)]
    assert len(pairs) > 10
    assert [pair for pair in pairs if pair[0].until != pair[1].since] == []
    assert [pair for pair in pairs if (pair[0].type, pair[0].default) == (pair[1].type, pair[1].default)] == []


# -- versions ----------------------------------------------------------------------------------------------------------


@by_rows("version", KNOWN_VERSIONS)
def test_the_engine_backend_is_there_before_1_3_0rc21(version: str) -> None:
    there = Version(version) < Version("1.3.0rc21")
    for owner in ENGINE_BACKEND:
        assert bool(members(owner, version)) is there
        if not there:
            with pytest.raises(KeyError, match=version):
                module_of(owner, version)
    for owner in ("LLM.pytorch", "KvCacheConfig", "QuantConfig", "SamplingParams"):
        assert members(owner, version) and module_of(owner, version)


def test_until_is_exclusive_and_pre_releases_count_as_packaging_orders_them() -> None:
    assert has("BuildConfig", "max_batch_size", "1.3.0rc20.post1")
    assert not has("BuildConfig", "max_batch_size", "1.3.0rc21")
    assert default_of("LLM.pytorch", "max_batch_size", "1.2.1") is None
    assert default_of("LLM.pytorch", "max_batch_size", "1.3.0rc0") == 2048


@by_table("annotation", "expected")
def test_only_a_choice_of_strings_has_choices(annotation: str, expected: tuple[str, ...] | None) -> None:
    assert choices(annotation) == (None if expected is None else tuple(expected))


# -- plain data becomes TensorRT-LLM's own objects, which check what they are given ------------------------------------


_PROGRAM = """
import json, sys
from djl_trtllm.backends.tensorrt_llm.names import build_arguments

def shown(value):
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)

for data in json.load(sys.stdin):
    try:
        print("MADE", json.dumps({name: shown(value) for name, value in build_arguments(data).items()}))
    except Exception as error:
        print("MADE", json.dumps(f"{type(error).__name__}: {error}"))
"""


def made(directory: Path, version: str, *data: dict[str, Any]) -> list[Any]:
    """What `build_arguments` makes of each of `data`, its objects as text; a text alone is an error."""
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(data),
        env={**os.environ, **fake_tensorrt_llm(directory, version=version)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("MADE ")]
    return [json.loads(line.removeprefix("MADE ")) for line in lines]


def test_classes_enums_and_attributes_are_made(tmp_path: Path) -> None:
    (arguments,) = made(
        tmp_path,
        "1.2.1",
        {
            "build_config": {
                "class": "BuildConfig",
                "max_batch_size": 8,
                "kv_cache_type": {"enum": "KVCacheType", "name": "PAGED"},
                "plugin_config": {"class": "PluginConfig", "gemm_plugin": None, "tokens_per_block": 64},
            },
            "cuda_graph_config": None,
            "max_num_tokens": 8192,
        },
    )
    assert (arguments["cuda_graph_config"], arguments["max_num_tokens"]) == (None, 8192)
    for part in ("max_batch_size=8", "PAGED", "tokens_per_block=64"):
        assert part in arguments["build_config"]


def test_what_a_class_does_not_take_is_its_own_error(tmp_path: Path) -> None:
    (error,) = made(tmp_path, "1.2.1", {"kv_cache_config": {"class": "KvCacheConfig", "free_gpu_memory_fraction": "a"}})
    assert error.startswith("ValidationError: ")


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1", "1.3.0"])
def test_everything_that_options_become_is_taken(checkpoint: Path, tmp_path: Path, version: str) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    data: dict[str, dict[str, Any]] = {}
    for backend in ("pytorch",) if version == "1.3.0" else ("tensorrt", "pytorch"):
        for case in CASES:
            try:
                config = configured(backend=backend, **{case.option: case.value})
                plan = plan_engine(config, inspect(model), gpu_machine(version, gpus=8))
            except ConfigError:
                continue  # this version or backend does not have it
            assert isinstance(plan, TensorRtLlmPlan)
            data[f"{backend} {case.option}"] = plan.running
            if isinstance(plan, TensorRtEnginePlan):
                data[f"{backend} {case.option} to build"] = plan.building
    assert len(data) > 100
    results = made(tmp_path, version, *data.values())
    assert {name: result for name, result in zip(data, results, strict=True) if isinstance(result, str)} == {}
