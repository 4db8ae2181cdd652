"""Plans of engines and checkpoints that TensorRT-LLM runs, and their sizes: what fits the memory, GPUs, adapters."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from djl_trtllm.backends.planning import fitted_to_memory, plan_engine
from djl_trtllm.backends.tensorrt_llm.compile import TensorRtLlmSpec
from djl_trtllm.backends.tensorrt_llm.plan import CheckpointPlan, TensorRtEnginePlan, TensorRtLlmPlan, adapter_limits
from djl_trtllm.config import Backend, Config, Options
from djl_trtllm.config.sources import Origin
from djl_trtllm.engines.build import prepare_engine
from djl_trtllm.engines.hardware import Gpu, Hardware
from djl_trtllm.errors import ConfigError, EngineMismatchError
from djl_trtllm.model import ModelKind, ModelShape, inspect
from djl_trtllm.model.adapter import AdapterLimits
from djl_trtllm.model.layout import inspect_config
from tests.backends.tensorrt_llm.kit import building, engine_planned, planned, problems, running
from tests.engines.helpers import CONTEXT, configured, gpu_machine, write_checkpoint, write_tensorrt_engine
from tests.sizing.configs import llama
from tests.support.tables import by_rows, by_table, table
from tests.support.vision import seeing_model_on_tensorrt_llm


def planned_on(path: Path, hardware: Hardware | None = None, /, **options: object) -> TensorRtLlmPlan:
    plan = plan_engine(configured(**options), inspect(path), hardware or gpu_machine())
    assert isinstance(plan, TensorRtLlmPlan)
    return plan


def engine_plan(path: Path, hardware: Hardware | None = None, /, **options: object) -> TensorRtEnginePlan:
    plan = planned_on(path, hardware, **options)
    assert isinstance(plan, TensorRtEnginePlan)
    return plan


def prepared(path: Path, hardware: Hardware, **options: object) -> Path:
    config = configured(engine_cache_dir=path.parent / "cache", **options)
    layout = inspect(path)
    return prepare_engine(config, layout, print, plan=plan_engine(config, layout, hardware))


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path) -> Path:
    """A compiled engine with the tokenizer beside it."""
    path = write_tensorrt_engine(tmp_path / "engine")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, path)
    return path


# -- an engine that is there ---------------------------------------------------------------------------------------


def test_a_compiled_engines_limits_are_the_plans(engine: Path) -> None:
    plan = engine_plan(engine)
    assert (plan.max_sequences, plan.max_seq_len, plan.max_input_len) == (16, 192, 160)
    assert plan.executor_options() == table(__file__, "options_of_an_engines_executor", engine=engine)


def test_lengths_are_compared_with_the_engines_as_far_as_the_models_context_has_them(engine: Path) -> None:
    with pytest.raises(EngineMismatchError, match="are 250 tokens together"):
        engine_plan(engine, max_input_len=100, max_output_len=150)
    assert engine_plan(engine, max_seq_len=4096).max_seq_len == 192


def test_a_repository_serves_the_engine_inside_it(checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository" / "tensorrt_llm"
    write_tensorrt_engine(repository / "1")
    (repository / "config.pbtxt").write_text('name: "tensorrt_llm"\n')
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, repository)
    assert prepared(repository.parent, gpu_machine()) == repository / "1"
    assert inspect(repository.parent).tokenizer_dir == repository


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    path = write_tensorrt_engine(tmp_path / "engine", ranks=2)
    plan = engine_plan(path, gpu_machine(gpus=2))
    (path / "rank1.engine").unlink()
    with pytest.raises(EngineMismatchError, match=r"is damaged:\n  - rank1\.engine: missing"):
        plan.check_whole(path)


# -- an engine that is to be compiled ------------------------------------------------------------------------------


def test_a_plan_to_compile_has_no_executor_yet(checkpoint: Path, engine: Path) -> None:
    plan = engine_plan(checkpoint)
    with pytest.raises(ValueError, match="no engine yet"):
        plan.executor_options()
    assert plan.at(engine).executor_options()["model"] == str(engine)


def test_the_compiler_is_reported_everything(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / ".out.partial"
    spec = engine_plan(checkpoint, quantize="int8").compile_spec(out)
    assert spec == TensorRtLlmSpec(**table(__file__, "spec_of_the_compiler", checkpoint=checkpoint, out=out))
    elsewhere = engine_plan(checkpoint, workspace=tmp_path / "fast").compile_spec(out)
    assert elsewhere.workspace == str(tmp_path / "fast" / "djl-trtllm.out.partial")


@by_table("options")
def test_what_changes_the_engine_changes_its_place_in_the_cache(checkpoint: Path, options: dict[str, object]) -> None:
    two = gpu_machine(gpus=2)
    assert planned_on(checkpoint, two, **options).cache_key != planned_on(checkpoint, two).cache_key


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": (Gpu("NVIDIA H100", (9, 0), 80 * 10**9),)},
        {"gpus": (Gpu("NVIDIA A100", (8, 0), 80 * 10**9),)},
        {"driver": "570.10"},
        {"tensorrt_llm": "1.2.0"},
        {"tensorrt": "10.14"},
    ],
)
def test_another_machine_has_engines_of_its_own(checkpoint: Path, change: dict[str, object]) -> None:
    other = dataclasses.replace(gpu_machine(), **change)  # type: ignore[arg-type]
    plan = engine_plan(checkpoint, other)
    assert plan.cache_key != planned_on(checkpoint).cache_key
    assert plan.versions["tensorrt-llm"] == other.tensorrt_llm and plan.versions.get("tensorrt") == other.tensorrt
    assert engine_plan(checkpoint, dataclasses.replace(gpu_machine(), gpus=(Gpu(),))).platform == "unknown"


# -- a checkpoint that is run as it is -----------------------------------------------------------------------------


def test_a_checkpoint_is_run_as_it_is(checkpoint: Path) -> None:
    plan = planned_on(checkpoint, gpu_machine("1.3.0"))
    assert isinstance(plan, CheckpointPlan)
    assert plan.compiler is None
    assert prepared(checkpoint, gpu_machine("1.3.0")) == checkpoint
    seeds = planned_on(checkpoint, backend="pytorch", ignored_seed="warn").executor_options()["accept_ignored_seeds"]
    assert seeds is True
    options = plan.at(checkpoint).executor_options()
    arguments = options.pop("arguments")
    assert arguments["max_seq_len"] == CONTEXT and arguments["enable_iter_perf_stats"] is True
    assert options == table(__file__, "options_of_a_checkpoints_executor", checkpoint=checkpoint)


def test_with_chunked_prefill_a_prompt_may_be_longer_than_an_iteration(engine: Path, checkpoint: Path) -> None:
    chunked = planned_on(checkpoint, backend="pytorch", enable_chunked_prefill="true")
    assert chunked.executor_options()["max_prompt_len"] == 0
    assert planned_on(checkpoint, backend="pytorch", max_num_tokens="500").executor_options()["max_prompt_len"] == 500
    assert engine_plan(engine, max_num_tokens=150).executor_options()["max_prompt_len"] == 150


@by_table("version", "options", "expected")
def test_stops_go_to_engines_that_do_not_lose_memory_with_them(
    checkpoint: Path, version: str, options: dict[str, object], expected: bool
) -> None:
    plan = planned_on(checkpoint, backend="pytorch", **options)
    plan = dataclasses.replace(plan, inputs=dataclasses.replace(plan.inputs, version=version))
    assert plan.executor_options()["stop_in_engine"] is expected


# -- messages ------------------------------------------------------------------------------------------------------


def test_the_details_are_what_one_would_write_in_python(checkpoint: Path) -> None:
    compiles, runs = planned_on(checkpoint, quantize="int8").details()
    assert compiles == (
        "TensorRT-LLM compiles LLM(build_config=BuildConfig(max_batch_size=32, max_input_len=256, max_num_tokens=8192, "
        "max_seq_len=256, plugin_config=PluginConfig(tokens_per_block=64)), "
        "quant_config=QuantConfig(quant_algo=QuantAlgo.W8A16))"
    )
    assert runs.startswith("TensorRT-LLM runs LLM(guided_decoding_backend='xgrammar', ")


# -- deriving the plan: what is refused before anything is compiled or loaded ------------------------------------------


def test_all_problems_are_reported_at_once(roomy: Path) -> None:
    found = problems(roomy, backend="pytorch", quantize="fp8", kv_cache_dtype="int8", tensor_parallel_degree=99)
    assert len(found) == 4


# -- which LoRA adapters an engine of TensorRT-LLM takes ---------------------------------------------------------------


SHAPE = ModelShape(num_layers=2, hidden=256)


def limits(backend: Backend, **options: Any) -> AdapterLimits:
    found = adapter_limits(Config(Options(enable_lora=True, **options)), SHAPE, backend)
    assert found is not None
    return found


@pytest.mark.parametrize("backend", [Backend.PYTORCH, Backend.AUTODEPLOY])
def test_adapters_of_a_checkpoint_have_modules_with_hugging_faces_names_and_all_without_the_option(
    backend: Backend,
) -> None:
    assert adapter_limits(Config(Options()), SHAPE, backend) is None
    found = limits(backend, max_lora_rank=16, lora_target_modules=("attn_q", "mlp_gate", "own"))
    assert (found.max_rank, found.hidden, found.layers) == (16, 256, 2)
    assert found.rank_setting.startswith("option.max_lora_rank=16 (")
    assert found.modules == frozenset({"q_proj", "up_proj", "own"})
    assert found.modules_setting.startswith("option.lora_target_modules=attn_q,mlp_gate,own (")
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "gate"} < (limits(backend).modules or set())
    assert limits(Backend.TENSORRT, lora_target_modules=("attn_q",)).modules is None, "its names are its family's"


MIB = 1 << 20
GPUS = {
    "A10G": Gpu("NVIDIA A10G", (8, 6), 23028 * MIB),
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81559 * MIB),
    "unknown": Gpu("NVIDIA A10G", (8, 6), None),
}


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model (as it differs from Llama 3 8B) and options on some GPUs, and what they become.

    `split`: where the rule that prompts are split comes from. Parts of the one `warning` and of the last `note`, or of
    the problem for which the model is `refused`.
    """

    model: dict[str, Any]
    options: dict[str, Any]
    gpu: str = "A10G"
    gpus: int = 1
    kind: str = "HF_CHECKPOINT"
    bundled: bool = False
    tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    origin: str = ""
    split: str = ""
    warning: list[str] = []
    note: list[str] = []
    refused: str = ""

    def fitted(self, tmp_path: Path, **options: object) -> Config:
        (tmp_path / "config.json").write_text(json.dumps(llama(**self.model)))
        found = inspect_config(tmp_path)
        assert found is not None
        bundled = tmp_path if self.bundled else None
        layout = replace(found, kind=ModelKind[self.kind], bundled_engine=bundled)
        config = configured(**{"tensor_parallel_degree": self.gpus} | self.options | options)
        return fitted_to_memory(config, layout, gpu_machine(gpus=self.gpus, gpu=GPUS[self.gpu]))


CASES = msgspec.convert(table(__file__, "fitted_to_memory"), list[Case])


@by_rows("case", CASES)
def test_what_the_memory_of_the_gpus_makes_of_max_num_tokens(tmp_path: Path, case: Case) -> None:
    if case.refused:
        with pytest.raises(ConfigError, match=case.refused):
            case.fitted(tmp_path)
        return
    found = case.fitted(tmp_path)
    options = found.options
    assert case.tokens in (msgspec.UNSET, options.max_num_tokens)
    assert str(found.origin("max_num_tokens")).startswith(case.origin)
    assert bool(case.split) == options.enable_chunked_prefill
    assert str(found.origin("enable_chunked_prefill")).startswith(case.split)
    assert len(found.warnings) == bool(case.warning), found.warnings
    assert [part for part in case.warning if part not in found.warnings[-1]] == []
    assert [part for part in case.note if part not in found.notes[-1]] == []
    asked = configured(**{"tensor_parallel_degree": 1} | case.options)
    for name in ("max_input_len", "max_output_len", "max_rolling_batch_size"):
        assert getattr(options, name) == getattr(asked.options, name), "nothing is widened"
    assert found.user_set == asked.user_set


def test_a_prompt_of_more_than_half_of_the_estimate_is_held_whole_where_it_fits(tmp_path: Path) -> None:
    tight = Case({"num_key_value_heads": 16, "max_position_embeddings": 131072}, {})
    half = tight.fitted(tmp_path).options.max_num_tokens
    assert half is not None and half < 16384
    found = tight.fitted(tmp_path, max_input_len=half + 10, max_output_len=10)
    assert (found.options.max_num_tokens, found.options.enable_chunked_prefill) == (half + 10, False)


def test_a_measured_number_that_leaves_no_room_for_longer_sequences_is_a_warning(tmp_path: Path) -> None:
    case = Case({}, {"max_input_len": 7500, "max_output_len": 512, "max_rolling_batch_size": 256})
    warning = case.fitted(tmp_path).warnings[-1]
    assert "option.max_num_tokens=16384" in warning and "less than one sequence of 8012" in warning
    assert "table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1 was measured with prompts of 3,700 tokens" in warning
    smaller = int(warning.partition("set option.max_num_tokens=")[2].partition(",")[0])
    advised = case.fitted(tmp_path, max_num_tokens=smaller).warnings
    assert not any("KV cache" in text or "does not fit" in text for text in advised)


def test_engine_and_cache_key_follow_the_number(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    described = inspect_config(model)
    assert described is not None
    plans = []
    for config in (configured(), configured().replace(Origin.derived("table"), max_num_tokens=77)):
        plan = plan_engine(config, described, gpu_machine(gpu=GPUS["A10G"]))
        assert isinstance(plan, TensorRtEnginePlan)
        plans.append(plan)
    assert plans[1].building["build_config"]["max_num_tokens"] == 77
    assert plans[0].cache_key != plans[1].cache_key
    assert "77 tokens per iteration (derived from table)" in plans[1].describe()


# -- tokens of an iteration ------------------------------------------------------------------------------------------


@by_table("options", "tokens")
def test_an_iteration_holds_what_the_batch_can_use(roomy: Path, options: dict[str, object], tokens: int) -> None:
    assert running(roomy, **options)["LLM.max_num_tokens"] == tokens
    assert building(roomy, **options)["BuildConfig.max_num_tokens"] == tokens


def test_an_iteration_holds_the_longest_prompt_unless_it_is_split(roomy: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(roomy, tmp_path / "m"))
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 131072}
    (path / "config.json").write_text(json.dumps(config))
    plan = planned(path, max_input_len=100_000)
    assert plan.inputs.max_num_tokens == 100_000
    assert "an iteration holds 100000 tokens, because prompts may be so long and are not split" in plan.notes[0]
    split = planned(path, max_input_len=100_000, enable_chunked_prefill="true")
    assert (split.inputs.max_num_tokens, split.notes) == (8192, ())


# -- GPUs ------------------------------------------------------------------------------------------------------------


def with_heads(roomy: Path, folder: Path, heads: int, kv_heads: int) -> Path:
    path = Path(shutil.copytree(roomy, folder / "m"))
    config = json.loads((path / "config.json").read_text())
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (path / "config.json").write_text(json.dumps(config))
    return path


@by_table("options", "gpus", "tensor")
def test_max_takes_every_gpu(roomy: Path, tmp_path: Path, options: dict[str, object], gpus: int, tensor: int) -> None:
    assert running(with_heads(roomy, tmp_path, 32, 8), "1.2.1", gpus, **options)["LLM.tensor_parallel_size"] == tensor


def test_gpus_of_other_machines_count_where_their_ranks_are_launched(
    roomy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_heads(roomy, tmp_path, 32, 8)
    options: dict[str, object] = {"tensor_parallel_degree": "max", "num_nodes": 2}
    assert running(model, "1.2.1", 4, **options)["LLM.tensor_parallel_size"] == 4
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1")
    assert running(model, "1.2.1", 4, **options)["LLM.tensor_parallel_size"] == 8
    assert running(model, "1.2.1", 4, tensor_parallel_degree=16)["LLM.tensor_parallel_size"] == 16


@by_rows("backend", ["tensorrt", "pytorch"])
@by_table("heads", "kv_heads", "degree", "problem")
def test_heads_that_cannot_be_split_are_an_error_before_anything_starts(
    roomy: Path, tmp_path: Path, backend: str, heads: int, kv_heads: int, degree: int, problem: str
) -> None:
    model = with_heads(roomy, tmp_path, heads, kv_heads)
    (found,) = problems(model, "1.2.1", 8, backend=backend, tensor_parallel_degree=degree)
    setting = f"option.tensor_parallel_degree={degree} (environment variable OPTION_TENSOR_PARALLEL_DEGREE)"
    assert found.startswith(f"{setting}: {problem}")
    assert "set an option.tensor_parallel_degree that divides" in found


@by_table("heads", "kv_heads", "options")
def test_heads_that_are_split_repeated_or_left_whole_are_planned(
    roomy: Path, tmp_path: Path, heads: int, kv_heads: int, options: dict[str, object]
) -> None:
    model = with_heads(roomy, tmp_path, heads, kv_heads)
    assert planned(model, "1.2.1", 8, **options).inputs.tensor_parallel == options["tensor_parallel_degree"]


def test_more_gpus_than_there_are_is_an_error_before_anything_starts(roomy: Path) -> None:
    (problem,) = problems(roomy, "1.2.1", 2, tensor_parallel_degree=2, pipeline_parallel_degree=2)
    assert problem == (
        "option.tensor_parallel_degree=2 (environment variable OPTION_TENSOR_PARALLEL_DEGREE) and "
        "option.pipeline_parallel_degree=2 (environment variable OPTION_PIPELINE_PARALLEL_DEGREE) need 4 GPUs, and 2 "
        "can be used here; with GPUs of several machines, start the server with trtllm-llmapi-launch"
    )


def test_a_checkpoint_in_tensorrt_llms_format_keeps_its_ranks(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text(
        '{"architecture": "LlamaForCausalLM", "dtype": "float16", "mapping": {"world_size": 2, "tp_size": 2}}'
    )
    for rank in range(2):
        shutil.copy(checkpoint / "model.safetensors", path / f"rank{rank}.safetensors")
    plan = engine_planned(path, "1.2.1", 2)
    assert plan.building["tensor_parallel_size"] == 2
    with pytest.raises(ConfigError, match=r"option\.tensor_parallel_degree=1 .*: the checkpoint is converted for 2"):
        planned(path, "1.2.1", 2, tensor_parallel_degree=1)


# -- the version ------------------------------------------------------------------------------------------------------


def test_a_version_that_cannot_be_reported_is_taken_for_the_stable_one(roomy: Path) -> None:
    plan = plan_engine(configured(), inspect(roomy), gpu_machine("of unknown version"))
    assert isinstance(plan, TensorRtLlmPlan)
    assert plan.inputs.version == "1.2.1"
    assert plan.notes == ("the version of TensorRT-LLM is unknown: it gets the arguments of 1.2.1",)


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    return seeing_model_on_tensorrt_llm(tmp_path / "model")[0]


def images_on(path: Path, version: str, /, **options: object) -> tuple[bool, str]:
    """Whether the engine takes images, and the plan's notes."""
    plan = planned_on(path, gpu_machine(version), **options)
    return bool(plan.at(path).executor_options().get("images")), "\n".join(plan.notes)


@pytest.mark.parametrize("version", ["1.2.0", "1.3.0", "1.4.0rc1"])
def test_images_are_served_by_the_pytorch_backend_of_releases_that_were_read(seeing: Path, version: str) -> None:
    assert images_on(seeing, version, backend="pytorch")[0]
    assert images_on(seeing, version, backend="pytorch", limit_mm_per_prompt='{"image": 3}')[0]
    assert not images_on(seeing, version, backend="pytorch", limit_mm_per_prompt='{"image": 0}')[0]


@pytest.mark.parametrize(("version", "backend"), [("1.1.0", "pytorch"), ("1.2.1", "autodeploy")])
def test_a_model_whose_images_are_not_served_says_so_and_images_that_were_asked_for_are_refused(
    seeing: Path, version: str, backend: str
) -> None:
    served, notes = images_on(seeing, version, backend=backend)
    assert not served and f"TensorRT-LLM {version}" in notes and "1.2.0" in notes
    (told,) = problems(seeing, version, backend=backend, limit_mm_per_prompt='{"image": 3}')
    assert told.startswith('option.limit_mm_per_prompt={"image": 3}') and f"TensorRT-LLM {version}" in told


def test_images_that_were_asked_for_of_a_model_that_takes_text_are_refused(checkpoint: Path) -> None:
    (told,) = problems(checkpoint, "1.2.1", backend="pytorch", limit_mm_per_prompt='{"image": 3}')
    assert "this model takes text only" in told


def test_drafts_of_prompts_with_images_are_refused(seeing: Path) -> None:
    drafts = {"backend": "pytorch", "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    (told,) = problems(seeing, "1.2.1", **drafts)
    assert "option.limit_mm_per_prompt" in told
    assert not images_on(seeing, "1.2.1", **drafts, limit_mm_per_prompt='{"image": 0}')[0]
