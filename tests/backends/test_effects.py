"""What options do on a backend: effects, the option maps, and what is said of an option that deviates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.backends.base import option_maps
from djl_trtllm.backends.effects import (
    Derived,
    Effects,
    Fixed,
    Needs,
    NoEffect,
    Passed,
    Target,
    describe_effect,
    has_effect,
    read_effects,
    refusals,
    with_admission,
)
from djl_trtllm.backends.planning import (
    automatic_backends,
    describe,
    deviations,
    effective_value,
    plan_engine,
    with_effects,
)
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtEnginePlan
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.options import OPTIONS, DeclaredOption, find
from djl_trtllm.config.options.option import as_text
from djl_trtllm.config.rules import check_model
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.backends.tensorrt_llm.kit import CASES
from tests.config.helpers import from_text
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine
from tests.support.tables import by_rows, by_table

SIZE = Target("LLM", "tensor_parallel_size")
DTYPE = Target("KvCacheConfig", "dtype")
TABLE = """
[one]
passed = { KvCacheConfig = ["host_cache_size", "kv_cache_dtype=dtype"] }
passed_when_set = { KvCacheConfig = ["use_uvm"] }
passed_as = { tensor_parallel_degree = "LLM.tensor_parallel_size, KvCacheConfig.dtype" }
without = { "one GPU" = ["gpus_per_node"] }
[other]
derived = { kv_cache_dtype = "KvCacheConfig.dtype: fp8 only", max_input_len = "limit: at admission" }
fixed = { "it has no switch" = { paged_kv_cache = true, tokens_per_block = 32 } }
refused = { kv_cache_dtype = { int8 = "take fp8" }, use_uvm = { true = "take none" } }
[other.needing."enable_lora=true".passed]
LLM = ["max_lora_rank"]
"""


def test_a_map_is_read_from_its_table_and_describes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "abacus").mkdir()
    (tmp_path / "abacus" / "__init__.py").touch()
    (tmp_path / "abacus" / "options.toml").write_text(TABLE)
    monkeypatch.syspath_prepend(tmp_path)
    effects = read_effects("abacus", "one", "other")
    lora = Needs("enable_lora", True)
    assert effects == {
        "host_cache_size": Passed((Target("KvCacheConfig", "host_cache_size"),)),
        "use_uvm": Passed((Target("KvCacheConfig", "use_uvm"),), when_set=True, refused={"true": "take none"}),
        "tensor_parallel_degree": Passed((SIZE, DTYPE)),
        "gpus_per_node": NoEffect("one GPU"),
        "kv_cache_dtype": Derived("fp8 only", (DTYPE,), refused={"int8": "take fp8"}),
        "max_input_len": Derived("limit: at admission"),
        "paged_kv_cache": Fixed(True, "it has no switch"),
        "tokens_per_block": Fixed(32, "it has no switch"),
        "max_lora_rank": Passed((Target("LLM", "max_lora_rank"),), needs=lora),
    }
    assert read_effects("abacus", "one")["kv_cache_dtype"] == Passed((DTYPE,))
    int8 = "option.kv_cache_dtype=int8 (environment variable OPTION_KV_CACHE_DTYPE)"
    assert refusals(configured(kv_cache_dtype="int8"), effects, "Abacus") == [
        f"{int8} is not available with Abacus: take fp8"
    ]
    assert refusals(configured(kv_cache_dtype="fp8", use_uvm="false"), effects, "Abacus") == []
    bound = Derived("limit", bound="max_sequences")
    assert [str(effect) for effect in (*effects.values(), bound)] == [
        "KvCacheConfig.host_cache_size",
        "KvCacheConfig.dtype: fp8 only",
        "KvCacheConfig.use_uvm, when set",
        "LLM(tensor_parallel_size) and KvCacheConfig.dtype",
        "no effect: one GPU",
        "limit: at admission",
        "always true: it has no switch",
        "always 32: it has no switch",
        "LLM(max_lora_rank), with option.enable_lora=true",
        "limit, or less where model, engine or memory allow no more",
    ]


def test_an_option_that_a_map_does_not_name_has_no_effect() -> None:
    dtype, strict, legacy = OPTIONS["dtype"], OPTIONS["strict"], OPTIONS["load_by_shard"]
    assert describe_effect(dtype, {}, "abacus") == "no effect on abacus"
    assert describe_effect(strict, {}, "abacus") == strict.option.effect
    assert describe_effect(legacy, {}, "abacus").startswith("no effect any more: ")
    assert [has_effect(option, {}) for option in (dtype, strict, legacy)] == [False, True, False]
    assert [has_effect(dtype, {"dtype": effect}) for effect in (NoEffect("why"), Passed((DTYPE,)))] == [False, True]


LIMIT: Effects = with_admission({"max_seq_len": Derived("limit"), "max_num_tokens": Derived("tokens")})
NEEDS: Effects = {"max_lora_rank": Passed((DTYPE,), needs=Needs("enable_lora", True)), "enable_lora": Derived("on")}
BLOCKS: Effects = {"tokens_per_block": Fixed(32, "blocks are fixed"), "max_input_len": Derived("limit")}


@by_rows(
    ("text", "effects", "longest", "said"),
    [
        ("tokens_per_block=128", {"tokens_per_block": NoEffect("why")}, None, "= 128 tokens ({}): no effect: why"),
        ("tokens_per_block=128", BLOCKS, None, "= 128 tokens ({}): always 32: blocks are fixed"),
        ("tokens_per_block=32\noption.max_input_len=8", BLOCKS, None, ""),
        ("mpi_mode=true", {}, None, "= true ({}): no effect: "),
        ("max_input_len=8", {}, None, "= 8 tokens ({}): no effect on abacus"),
        ("max_lora_rank=8", NEEDS, None, "= 8 dimensions ({}): no effect without option.enable_lora=true"),
        ("max_lora_rank=8\noption.enable_lora=true", NEEDS, None, ""),
        # A limit is named where the plan lowers it.
        ("max_seq_len=50\noption.max_num_tokens=7", LIMIT, 50, ""),
        ("max_seq_len=50\noption.max_num_tokens=7", LIMIT, None, ""),
        ("max_seq_len=50", LIMIT, 49, f"= 50 tokens ({{}}): 49 tokens here: {LIMIT['max_seq_len']}"),
        ("max_seq_len=none", LIMIT, 9, ""),
        # A warning names it already.
        ("load_by_shard=true", {}, None, ""),
    ],
)
def test_an_option_that_deviates_is_named_with_value_origin_and_reason(
    text: str, effects: Effects, longest: int | None, said: str
) -> None:
    plan = None if longest is None else SimpleNamespace(max_seq_len=longest)
    lines = list(deviations(from_text(f"option.{text}"), effects, "abacus", plan).values())
    assert len(lines) == bool(said)
    start = f"option.{text.partition('=')[0]} {said.format('serving.properties:1')}"
    assert not said or lines[0].startswith(start), lines


def test_the_value_on_a_backend_is_what_it_always_is_there_or_the_configured_one() -> None:
    config = from_text("option.tokens_per_block=128")
    assert [effective_value(config, BLOCKS, name) for name in (*BLOCKS, "max_seq_len")] == [32, 1024, None]


def test_what_admission_honours_has_an_effect_without_the_backends_saying_so() -> None:
    effects = with_admission({"max_input_len": Derived("beads")})
    text = "option.max_input_len=8\noption.max_output_len=8\noption.max_seq_len=8\noption.max_rolling_batch_size=8"
    config = from_text(f"{text}\noption.max_num_sequences=8")
    assert (len(deviations(config, effects, "abacus")), len(deviations(config, {}, "abacus"))) == (0, 5)
    assert describe_effect(OPTIONS["max_input_len"], effects, "abacus").startswith("beads")
    assert describe_effect(OPTIONS["max_output_len"], effects, "abacus") == "limit at admission"


@pytest.mark.parametrize(
    ("name", "of_the_plan"),
    [
        ("max_input_len", "max_input_len"),
        ("max_seq_len", "max_seq_len"),
        ("max_rolling_batch_size", "max_sequences"),
        ("max_num_sequences", "max_sequences"),
    ],
)
def test_a_limit_that_the_plan_lowers_is_named(name: str, of_the_plan: str) -> None:
    config = from_text(f"option.{name}=50")
    for allowed, named in ((50, False), (49, True)):
        limits = dict.fromkeys(("max_input_len", "max_seq_len", "max_sequences"), 50) | {of_the_plan: allowed}
        lines = deviations(config, with_admission({}), "abacus", SimpleNamespace(**limits))
        assert (f"option.{name}" in "".join(lines.values())) == named


def test_an_option_that_a_warning_or_a_note_of_the_plan_names_is_not_named_again() -> None:
    config = from_text("engine=DeepSpeed")
    assert "another engine of DJL Serving and has no effect" in config.warnings[0]
    assert deviations(config, {}, "abacus") == {}
    config = from_text("option.max_seq_len=50")
    for origin, lines in (("serving.prop", 1), ("serving.properties:1", 0)):
        plan = SimpleNamespace(max_seq_len=9, notes=(f"9 tokens, and not 50 as from option.max_seq_len=50 ({origin})",))
        assert len(deviations(config, LIMIT, "abacus", plan)) == lines


def test_no_secret_is_shown() -> None:
    config = from_text("keystore_pass=hunter2\noption.env=HF_TOKEN=hunter2")
    lines = deviations(config, {}, "abacus")
    assert len(lines) == 2 and "hunter2" not in "\n".join(lines.values())


# -- the maps of all backends ------------------------------------------------------------------------------------------


def test_a_map_names_options_whose_effect_depends_on_the_backend() -> None:
    maps = option_maps()
    assert set(maps) == set(Backend) - {Backend.AUTO}
    mapped = {name for effects in maps.values() for name in effects}
    assert mapped == {name for name in mapped if name in OPTIONS and not OPTIONS[name].option.effect_everywhere}
    assert mapped >= {name for name, declared in OPTIONS.items() if not declared.option.effect_everywhere}
    assert maps[Backend.AUTODEPLOY] == maps[Backend.PYTORCH]


def test_auto_names_the_backends_that_it_chooses_from() -> None:
    text = describe(OPTIONS["max_num_tokens"], Backend.AUTO)
    assert text == "; ".join(f"{one}: {describe(OPTIONS['max_num_tokens'], one)}" for one in automatic_backends())
    assert text.startswith("tensorrt: BuildConfig.max_num_tokens and LLM(max_num_tokens); pytorch: ")
    assert describe(OPTIONS["strict"], Backend.AUTO) == OPTIONS["strict"].option.effect


@by_table("setting", "on_tensorrt", "on_openvino")
def test_no_warning_says_what_the_backend_does_not_do(
    setting: str, on_tensorrt: list[int], on_openvino: list[int]
) -> None:
    for backend, expected in ((Backend.TENSORRT, on_tensorrt), (Backend.OPENVINO, on_openvino)):
        config = with_effects(from_text(setting), backend)
        assert [len(config.warnings), len(config.notes)] == expected, backend


def test_options_that_djl_serving_reads_have_their_effect_there() -> None:
    config = from_text("option.async_mode=true\nminWorkers=1\noption.skip_tokenizer_init=true")
    for under_djl, named in (
        (False, ["option.skip_tokenizer_init", "option.async_mode", "minWorkers"]),
        (True, ["option.skip_tokenizer_init"]),
    ):
        notes = with_effects(config, Backend.OPENVINO, under_djl=under_djl).notes
        assert [line.split()[0] for line in notes] == named
    for backend in (Backend.AUTO, Backend.OPENVINO):
        assert describe(OPTIONS["async_mode"], backend, under_djl=True) == "DJL Serving's async mode"
        assert describe(OPTIONS["min_workers"], backend, under_djl=True) == "read by DJL Serving"
        assert describe(OPTIONS["async_mode"], backend).startswith("no effect: under DJL Serving")
        assert describe(OPTIONS["skip_tokenizer_init"], backend, under_djl=True).startswith("no effect: ")


# -- each option alone, on each backend: what is said of it is what happens to the engine's arguments ------------------
#
# An option that changes nothing is named in the log with the reason, and one that changes something is not.


BACKENDS = [Backend.TENSORRT, Backend.PYTORCH, Backend.OPENVINO, Backend.SCRIPTED]
VALUES = {declared.name: str(case.value) for case in CASES if (declared := find(f"option.{case.option}"))}
OF_A_BACKEND = [
    declared
    for declared in OPTIONS.values()
    if not declared.option.effect_everywhere and declared.name not in ("backend", "script")
]


def value_of(declared: DeclaredOption) -> str:
    """A value that is not the default."""
    if declared.option.example and declared.type.base is str:
        return declared.option.example
    if declared.name in VALUES:
        return VALUES[declared.name]
    default = as_text(declared.default)
    if declared.type.choices:
        return next(value for value in declared.type.choices if value != default)
    if declared.type.base is bool:
        return "false" if declared.default else "true"
    if declared.option.example:
        return declared.option.example
    if declared.type.base in (int, float):
        return as_text(declared.default * 2 or 1)
    return "other"


def said(config: Config, plan: EnginePlan, declared: DeclaredOption) -> list[str]:
    """The lines of the log that name the option, by its key or as the variable that was set."""
    names = (declared.key, f"OPTION_{declared.name.upper()}")
    return [line for line in (*config.notes, *config.warnings, *plan.notes) if line.startswith(names)]


def has_its_own_way(declared: DeclaredOption, backend: Backend, config: Config) -> bool:
    """Whether the backend does as the value says without it, or receives it where it has no use for it."""
    effect = option_maps()[backend].get(declared.name)
    if isinstance(effect, Fixed):
        return bool(effect.value == getattr(config.options, declared.name))
    if isinstance(effect, Passed) and declared.name == "awq_block_size":
        return True  # a rule says that it needs AWQ, by either of two options
    return isinstance(effect, Passed | Derived) and effect.needs is not None and not effect.needs.met(config)


def planned(checkpoint: Path, backend: Backend, **options: str) -> tuple[Config, EnginePlan]:
    hardware = CPU_ONLY if backend in (Backend.OPENVINO, Backend.SCRIPTED) else gpu_machine(gpus=8)
    layout = inspect(checkpoint)
    config = check_model(configured(backend=backend.value, **options), layout.shape.model_type, is_engine=False)
    plan = plan_engine(config, layout, hardware)
    return with_effects(config, backend, plan), plan


def arguments(config: Config, plan: EnginePlan) -> list[Any]:
    """All that a backend makes of the options."""
    limits = [plan.max_sequences, plan.max_seq_len, plan.max_input_len, config.options.max_output_len, plan.describe()]
    if isinstance(plan, TensorRtEnginePlan):
        running = plan._executor_options(Path("/engine"))
        return [*limits, plan.building, running, plan.compile_spec(Path("/out"))]
    limits.append(plan.stream_interval)
    if plan.compiler is not None:
        return [*limits, plan.at(Path("/engine")).executor_options(), plan.compile_spec(Path("/out"))]
    return [*limits, plan.executor_options()]


@by_rows("backend", BACKENDS)
def test_what_is_said_of_an_option_is_what_happens(roomy: Path, backend: Backend) -> None:
    before = arguments(*planned(roomy, backend))
    wrong = []
    for declared in OF_A_BACKEND:
        value = value_of(declared)
        try:
            config, plan = planned(roomy, backend, **{declared.name: value})
        except ConfigError as refused:
            assert any(declared.key in problem for problem in refused.problems)
            continue
        told = said(config, plan, declared)
        if has_its_own_way(declared, backend, config):
            effect = option_maps()[backend][declared.name]
            right = bool(told) != isinstance(effect, Fixed)
        else:
            right = (arguments(config, plan) != before) != bool(told)
        if not right:
            wrong.append((declared.name, value, told))
    assert wrong == []
