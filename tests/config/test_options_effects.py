"""What each option becomes on TensorRT-LLM: a field that is really there, or a reason why it has no effect."""

from __future__ import annotations

import re
from pathlib import Path

from djl_trtllm.backends.tensorrt_llm.names import has, members
from djl_trtllm.config import Backend
from djl_trtllm.config.registry import OPTIONS, find
from djl_trtllm.config.target import named_targets

VERSION = "1.2.1"

# What TensorRT-LLM calls it, for options that carry one value straight to one field.
RENAMED = {
    "tensor_parallel_degree": "LLM(tensor_parallel_size)",
    "pipeline_parallel_degree": "LLM(pipeline_parallel_size)",
    "batch_scheduler_policy": "SchedulerConfig.capacity_scheduler_policy",
    "kv_cache_free_gpu_mem_fraction": "KvCacheConfig.free_gpu_memory_fraction, 0.95 when not set",
    "max_tokens_in_paged_kv_cache": "KvCacheConfig.max_tokens",
    "enable_kv_cache_reuse": "KvCacheConfig.enable_block_reuse, and the engine needs use_paged_context_fmha",
    "tokens_per_block": "PluginConfig.tokens_per_block and KvCacheConfig.tokens_per_block",
    "max_num_sequences": "BuildConfig.max_batch_size, and LLM(max_batch_size) where it is below max_rolling_batch_size",
    "max_rolling_batch_size": "LLM(max_batch_size), and BuildConfig.max_batch_size where max_num_sequences is not set",
    "max_num_tokens": "BuildConfig.max_num_tokens and LLM(max_num_tokens)",
    "smoothquant_alpha": "QuantConfig.smoothquant_val, with smoothquant",
    "awq_block_size": "QuantConfig.group_size",
    "calib_device": "CalibConfig.device",
    "context_fmha_fp32_acc": "ExtendedRuntimePerfKnobConfig.enable_context_fmha_fp32_acc",
}


def test_every_target_on_tensorrt_llm_is_a_field_it_has() -> None:
    targets = [
        (name, f"LLM.{backend}" if target.owner == "LLM" else target.owner, target.name)
        for name, declared in OPTIONS.items()
        for backend in ("tensorrt", "pytorch")
        for target in named_targets(getattr(declared.option, backend))
    ]
    assert len(targets) > 200
    assert [target for target in targets if not has(target[1], target[2], VERSION)] == []


def test_options_of_the_documents_reach_the_field_of_todays_name() -> None:
    assert {name: OPTIONS[name].option.tensorrt for name in RENAMED} == RENAMED


def test_an_option_with_tensorrt_llms_own_name_reaches_that_field() -> None:
    own = [
        name
        for holder in ("KvCacheConfig", "SchedulerConfig", "BuildConfig", "PluginConfig", "CalibConfig", "QuantConfig")
        for name in sorted(members(holder, VERSION).keys() & OPTIONS.keys())
    ]
    assert len(own) > 50
    wrong = []
    for name in own:
        option = OPTIONS[name].option
        text = f"{option.effect_on(Backend.TENSORRT)} {option.effect_on(Backend.PYTORCH)}"
        if name not in {target.name for target in named_targets(text)} and "no effect" not in text:
            wrong.append((name, text))
    assert wrong == []


def test_an_option_reaches_a_backend_or_says_why_not() -> None:
    in_words = {"trust_remote_code", "logits_dtype", "kv_cache_dtype"}
    unsaid = [
        (name, text)
        for name, declared in OPTIONS.items()
        if not declared.option.legacy and not declared.option.effect and name not in in_words
        for text in (declared.option.tensorrt, declared.option.pytorch)
        if not named_targets(text)
        and not (text.startswith(("no effect: ", "ignored: ", "refused ")) and len(text) > 20)
    ]
    assert unsaid == []


# -- the tables of docs/tensorrt-llm.md --------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| `(option\.\w+)` \|(.+)\|")


def rows(heading: str) -> dict[str, tuple[str, str]]:
    """The first two cells behind the option, by option."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = {found[1]: [cell.strip() for cell in found[2].split("|")] for found in ROW.finditer(section)}
    return {key: (first, second) for key, (first, second, *_) in cells.items()}


def effect(key: str, backend: Backend) -> str:
    declared = find(key)
    assert declared is not None, f"{key} is no option"
    return declared.option.effect_on(backend)


def agrees(cell: str, declared: str) -> bool:
    """Whether a cell names one of the arguments of a declared effect, or none where there is no effect."""
    if cell == "none":
        return declared.startswith("no effect")
    return cell.strip("`") in {str(target) for target in named_targets(declared)}


def test_build_options_become_what_the_page_says() -> None:
    build = rows("Build options")
    assert len(build) > 10
    said = {key: (cell, effect(key, Backend.TENSORRT)) for key, (cell, _) in build.items()}
    assert {key: pair for key, pair in said.items() if not agrees(*pair)} == {}


def test_runtime_options_become_what_the_page_says() -> None:
    runtime = rows("Runtime options")
    assert len(runtime) > 10
    said = {}
    for key, (engine, pytorch) in runtime.items():
        said[key, Backend.TENSORRT] = (engine, effect(key, Backend.TENSORRT))
        said[key, Backend.PYTORCH] = (engine if pytorch == "the same" else pytorch, effect(key, Backend.PYTORCH))
    assert {key: pair for key, pair in said.items() if not agrees(*pair)} == {}


def test_every_option_the_page_names_is_one() -> None:
    named = set(re.findall(r"`(option\.\w+)", PAGE))
    assert len(named) > 20
    assert sorted(name for name in named if find(name) is None) == []
