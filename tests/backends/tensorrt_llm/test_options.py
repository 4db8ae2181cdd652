"""What each option becomes on TensorRT-LLM: a field that is really there, or a reason why it has no effect."""

from __future__ import annotations

import re
from pathlib import Path

from djl_trtllm.backends.effects import Derived, Effect, Effects, NoEffect, Passed, Target
from djl_trtllm.backends.tensorrt_llm.names import has, members
from djl_trtllm.backends.tensorrt_llm.options import ENGINE, PYTORCH
from djl_trtllm.config import Backend
from djl_trtllm.config.options.registry import OPTIONS, find

VERSION = "1.2.1"

# What TensorRT-LLM calls it, for options that carry one value straight to one field.
RENAMED = {
    "tensor_parallel_degree": "LLM(tensor_parallel_size)",
    "pipeline_parallel_degree": "LLM(pipeline_parallel_size)",
    "batch_scheduler_policy": "SchedulerConfig.capacity_scheduler_policy",
    "kv_cache_free_gpu_mem_fraction": "KvCacheConfig.free_gpu_memory_fraction",
    "max_tokens_in_paged_kv_cache": "KvCacheConfig.max_tokens",
    "enable_kv_cache_reuse": "KvCacheConfig.enable_block_reuse",
    "tokens_per_block": "PluginConfig.tokens_per_block and KvCacheConfig.tokens_per_block",
    "max_num_sequences": "BuildConfig.max_batch_size and LLM(max_batch_size)",
    "max_rolling_batch_size": "LLM(max_batch_size) and BuildConfig.max_batch_size",
    "max_num_tokens": "BuildConfig.max_num_tokens and LLM(max_num_tokens)",
    "smoothquant_alpha": "QuantConfig.smoothquant_val",
    "awq_block_size": "QuantConfig.group_size",
    "calib_device": "CalibConfig.device",
    "context_fmha_fp32_acc": "ExtendedRuntimePerfKnobConfig.enable_context_fmha_fp32_acc",
}


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


def test_options_of_the_documents_reach_the_field_of_todays_name() -> None:
    assert {name: " and ".join(map(str, targets(ENGINE[name]))) for name in RENAMED} == RENAMED


def test_an_option_with_tensorrt_llms_own_name_reaches_that_field() -> None:
    own = [
        name
        for holder in ("KvCacheConfig", "SchedulerConfig", "BuildConfig", "PluginConfig", "CalibConfig", "QuantConfig")
        for name in sorted(members(holder, VERSION).keys() & OPTIONS.keys())
        if not OPTIONS[name].option.legacy
    ]
    assert len(own) > 50
    reached = {name: {target.name for map_ in (ENGINE, PYTORCH) for target in targets(map_.get(name))} for name in own}
    # Today's name for paged_kv_cache is kv_cache_type.
    assert [name for name in own if name not in reached[name]] == ["paged_kv_cache"]


def test_a_derived_argument_says_how_it_follows() -> None:
    derived = [effect for effects in (ENGINE, PYTORCH) for effect in effects.values() if isinstance(effect, Derived)]
    assert derived and all(effect.note for effect in derived)


# -- the tables of docs/tensorrt-llm.md --------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[3] / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| `(option\.\w+)` \|(.+)\|")


def rows(heading: str) -> dict[str, tuple[str, str]]:
    """The first two cells behind the option, by option."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = {found[1]: [cell.strip() for cell in found[2].split("|")] for found in ROW.finditer(section)}
    return {key: (first, second) for key, (first, second, *_) in cells.items()}


def effect(key: str, effects: Effects) -> Effect | None:
    declared = find(key)
    assert declared is not None, f"{key} is no option"
    return effects.get(declared.name)


def agrees(cell: str, effect: Effect | None) -> bool:
    """Whether a cell names one of the arguments of an effect, or none where there is no effect."""
    if cell == "none":
        return effect is None or isinstance(effect, NoEffect)
    return cell.strip("`") in {str(target) for target in targets(effect)}


def test_build_options_become_what_the_page_says() -> None:
    build = rows("Build options")
    assert len(build) > 10
    said = {key: (cell, effect(key, ENGINE)) for key, (cell, _) in build.items()}
    assert {key: pair for key, pair in said.items() if not agrees(*pair)} == {}


def test_runtime_options_become_what_the_page_says() -> None:
    runtime = rows("Runtime options")
    assert len(runtime) > 10
    said = {}
    for key, (engine, pytorch) in runtime.items():
        said[key, Backend.TENSORRT] = (engine, effect(key, ENGINE))
        said[key, Backend.PYTORCH] = (engine if pytorch == "the same" else pytorch, effect(key, PYTORCH))
    assert {key: pair for key, pair in said.items() if not agrees(*pair)} == {}


def test_every_option_the_page_names_is_one() -> None:
    named = set(re.findall(r"`(option\.\w+)", PAGE))
    assert len(named) > 20
    assert sorted(name for name in named if find(name) is None) == []
