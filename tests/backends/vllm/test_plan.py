"""What options, model and machine become as vLLM's arguments, and what is refused before vLLM starts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.base import backend_named, this_machine
from djl_trtllm.backends.planning import choose_backend, plan_fitted, with_effects
from djl_trtllm.backends.vllm.backend import REASONS, VllmPlan, VllmPoolingPlan
from djl_trtllm.backends.vllm.names import arguments_of, known_versions
from djl_trtllm.config import Backend, Task
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.model import inspect
from tests.backends.vllm import FAKE
from tests.config.helpers import from_text
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine
from tests.support.encoders import scripted_encoder, write_modules
from tests.support.tables import by_rows, by_table
from tests.support.vision import seeing_model
from tools.vllm.names import TABLE, differences, members_of


def machine(version: str = "0.32.0", gpus: int = 1) -> Hardware:
    return replace(gpu_machine(None, gpus), vllm=version)


def planned(model: Path, hardware: Hardware | None = None, **options: Any) -> VllmPlan:
    given = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    config = configured(**{"backend": "vllm", **given})
    _, plan = plan_fitted(config, inspect(model), hardware or machine())
    assert isinstance(plan, VllmPlan)
    return plan


def refused(model: Path, hardware: Hardware | None = None, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        planned(model, hardware, **options)
    return list(map(str, caught.value.problems))


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_what_the_user_does_not_set_is_vllms_own_or_lmis_with_vllm(roomy: Path) -> None:
    plan = planned(roomy)
    assert plan.arguments == {
        "model": str(roomy),
        "tokenizer": str(roomy),
        "max_num_seqs": 256,
        "max_model_len": -1,
        "tensor_parallel_size": 1,
        "structured_outputs_config": {"backend": "xgrammar"},
    }
    assert (plan.max_seq_len, plan.max_input_len, plan.gpus) == (8192, 8191, 1)
    assert plan.reason.startswith("option.backend=vllm (")
    options = plan.executor_options()
    assert (options["images"], options["tokenizer_dir"], options["guides"]) == (False, str(roomy), "xgrammar")


@pytest.mark.parametrize(("running", "waiting"), [(1, 2), (40, 10), (256, 16)])
def test_an_engine_gets_some_sequences_beyond_those_that_run(roomy: Path, running: int, waiting: int) -> None:
    plan = planned(roomy, max_rolling_batch_size=running)
    assert plan.executor_options()["lookahead"] == waiting


@by_table("options", "arguments")
def test_an_option_becomes_the_argument_of_its_name(
    roomy: Path, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    plan = planned(roomy, machine(gpus=2), **options)
    assert {name: plan.arguments.get(name) for name in arguments} == arguments
    assert set(plan.arguments) <= set(arguments_of("0.32.0"))
    assert json.loads(json.dumps(plan.arguments)) == plan.arguments and "<" not in "".join(plan.details())


@by_table("options", "said")
def test_what_vllm_would_not_take_is_one_line_before_it_starts(roomy: Path, options: dict[str, Any], said: str) -> None:
    (problem,) = refused(roomy, **options)
    assert said in problem


SOURCES = {
    "__init__.py": "",
    "config/model.py": 'PerformanceMode = Literal["balanced", "throughput"]',
    "config/speculative.py": (
        'Drafts = Literal["eagle"]\nMethod = Literal["ngram", Drafts]\n'
        "class SpeculativeConfig:\n    method: Method | None = None\n    num_speculative_tokens: int = 1\n"
    ),
    "model_executor/layers/quantization/__init__.py": 'Methods = Literal["own", "fp8"]',
    "v1/attention/backends/registry.py": 'class AttentionBackendEnum(Enum):\n    """Doc."""\n    MINE = ""',
    "engine/arg_utils.py": (
        "class EngineArgs:\n    performance_mode: PerformanceMode\n    speculative_config: dict | None\n"
        "    quantization: Methods | str | None\n    attention_backend: AttentionBackendEnum | None\n"
        "    model: str\n    tokenizer: str\n    max_num_seqs: int\n    max_model_len: int\n"
        "    tensor_parallel_size: int\n    structured_outputs_config: dict\n"
    ),
}
"""Files of a vLLM that is installed, with the values that its arguments take."""


def installed(site: Path, plugin: str = "vllm.plugins.lora:own") -> Path:
    files = {f"vllm/{name}": text for name, text in SOURCES.items()} | {
        "vllm-0.32.0.dist-info/METADATA": "Name: vllm\nVersion: 0.32.0\n",
        "vllm-0.32.0.dist-info/entry_points.txt": f"[vllm.general_plugins]\none = {plugin}\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return site


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"performance_mode": "througput"}, "PERFORMANCE_MODE=througput (environment): expected 'balanced' or"),
        (
            {"speculative_config": {"method": "ngrm", "num_speculative_tokens": 2}},
            "speculative_config.method: expected 'ngram' or 'eagle' or null, not 'ngrm'; did you mean 'ngram'?",
        ),
        ({"quantization": "unheard"}, "option.quantization=unheard (environment variable OPTION_QUANTIZATION): vLLM"),
        ({"quantization": "unheard"}, "it has own, fp8"),
        ({"attention_backend": "MINR"}, "did you mean MINE?"),
    ],
)
def test_a_value_that_the_installed_version_does_not_list_is_one_line(
    roomy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site")))
    (problem,) = refused(roomy, **options)
    assert said in problem


def test_a_value_that_a_plug_in_may_add_is_left_to_vllm_which_the_notes_say(
    roomy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (note,) = planned(roomy, quantization="unheard").notes
    assert note.startswith("option.quantization=unheard (") and "unless a plug-in adds it" in note
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site", "mine:register")))
    for asked in ("unheard", "owm"):
        plan = planned(roomy, quantization=asked)
        assert plan.arguments["quantization"] == asked and len(plan.notes) == 1


def test_the_gpus_of_a_file_are_processes_on_a_cpu_which_the_notes_say(roomy: Path) -> None:
    cpu = replace(CPU_ONLY, vllm="0.32.0", vllm_on_cpu=True)
    plan = planned(roomy, cpu, tensor_parallel_degree=2)
    assert plan.arguments["tensor_parallel_size"] == 2
    assert any(note.startswith("option.tensor_parallel_degree=2 (") and "NUMA" in note for note in plan.notes)
    for degree in (1, "max"):
        assert planned(roomy, cpu, tensor_parallel_degree=degree).notes == ()


@pytest.mark.parametrize(("degree", "gpus"), [(3, 8), ("max", 3)])
def test_heads_that_cannot_be_divided_are_one_line_before_vllm_starts(
    roomy: Path, degree: int | str, gpus: int
) -> None:
    (problem,) = refused(roomy, machine(gpus=gpus), tensor_parallel_degree=degree)
    assert "attention heads cannot be divided among 3 GPUs" in problem and str(degree) in problem


def test_a_wrong_argument_in_a_file_is_said_with_file_and_line(roomy: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max_logprobs: 5\ncompilation_confg:\n  level: 3\n")
    (problem,) = refused(roomy, extra_engine_args=str(file))
    assert f"{file} line 2: compilation_confg" in problem and "compilation_config" in problem


def test_an_argument_that_the_version_lacks_is_said_by_its_option(roomy: Path) -> None:
    assert "calculate_kv_scales" in arguments_of("0.26.0") and "calculate_kv_scales" not in arguments_of("0.32.0")
    given: dict[str, Any] = {"extra_engine_args": {"calculate_kv_scales": True}}
    assert planned(roomy, machine("0.26.0"), **given).arguments["calculate_kv_scales"] is True
    (problem,) = refused(roomy, None, **given)
    assert "vLLM 0.32.0 has no such argument" in problem


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("option.disable_sliding_windw=true", "did you mean option.disable_sliding_window?"),
        ("option.max_rolling_batch_prefill_tokes=1", "did you mean option.max_rolling_batch_prefill_tokens?"),
        ("option.nothing_like_it=secret", "is neither an option nor an argument of vllm"),
        ("option.disable_log_stats=true", "has no effect: the server shows"),
    ],
)
def test_a_setting_that_vllm_does_not_get_is_a_warning(line: str, said: str) -> None:
    config = with_effects(from_text(f"option.rolling_batch=vllm\n{line}"), Backend.VLLM)
    (warning,) = config.warnings
    assert warning.startswith(line.split("=")[0]) and said in warning and "serving.properties:2" in warning
    assert "secret" not in warning


def test_a_setting_that_vllm_does_not_have_is_refused_with_strict() -> None:
    text = "option.rolling_batch=vllm\noption.strict=true\noption.seed=1\noption.seeds=1"
    with pytest.raises(ConfigError, match=r"option.seeds \(serving.properties:4\)"):
        with_effects(from_text(text), Backend.VLLM)


@pytest.mark.parametrize(
    "line", ["option.quantize=gptq", "option.load_format=mistral", "option.kv_cache_dtype=fp8_e5m2"]
)
def test_a_word_of_vllms_is_refused_with_the_way_out_where_no_file_names_vllm(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_text(line)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{line} (") and "option.backend=vllm" in problem
    assert from_text(f"{line}\noption.rolling_batch=lmi-dist").warnings == ()


# -- which engine ------------------------------------------------------------------------------------------------------


@by_table("line", "backend")
def test_a_file_that_names_vllm_in_lmis_words_chooses_it_unless_a_backend_is_set(line: str, backend: str) -> None:
    config = from_text(line)
    assert config.options.backend == backend
    if backend == "vllm":
        assert line.splitlines()[0] in str(config.origin("backend"))


def test_an_engine_that_a_file_names_and_another_one_runs_is_a_warning() -> None:
    config = from_text("option.rolling_batch=trtllm")
    (warning,) = with_effects(config, Backend.OPENVINO).warnings
    assert "names TensorRT-LLM, and openvino runs the model" in warning
    assert with_effects(config, Backend.PYTORCH).warnings == with_effects(config, Backend.TENSORRT).warnings == ()
    assert with_effects(config, Backend.OPENVINO, under_djl=True).warnings == ()  # it selects DJL Serving's mode


@by_rows(
    ("hardware", "backend", "said"),
    [
        (machine(), "vllm", ("vLLM 0.32.0 is installed and there is a GPU",)),
        (replace(gpu_machine("1.2.1"), vllm="0.32.0"), "tensorrt", ("TensorRT-LLM 1.2.1", "option.backend=vllm would")),
        (
            replace(CPU_ONLY, vllm="0.32.0", vllm_on_cpu=True, openvino=True),
            "openvino",
            ("OpenVINO, which is taken on a CPU",),
        ),
        (replace(CPU_ONLY, vllm="0.32.0", vllm_on_cpu=True), "vllm", ("OpenVINO is not",)),
        (replace(CPU_ONLY, vllm="0.32.0"), "openvino", ("vLLM 0.32.0 needs a GPU",)),
        (replace(machine(), vllm="0.9.0"), "openvino", ("0.26.0 is the oldest",)),
    ],
)
def test_auto_says_which_engine_it_takes_and_why(
    roomy: Path, hardware: Hardware, backend: str, said: tuple[str, ...]
) -> None:
    chosen, reason = choose_backend(configured(), inspect(roomy), hardware)
    assert chosen == backend and all(part in reason for part in said), reason


def test_vllm_that_is_asked_for_and_not_there_is_one_line(roomy: Path) -> None:
    for hardware, said in ((gpu_machine("1.2.1"), "not installed"), (replace(CPU_ONLY, vllm="0.32.0"), "NVIDIA GPU")):
        with pytest.raises(EngineError) as caught:
            planned(roomy, hardware)
        assert said in str(caught.value) and "option.backend=auto" in str(caught.value)


def test_an_architecture_that_vllm_lacks_is_said_from_config_json(
    roomy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "vllm"
    (package / "model_executor" / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the server imports it')")
    registry = (
        '_TEXT_GENERATION_MODELS = {"LlamaForCausalLM": ("llama", "L")}\n_REWARD_MODELS = {"BertModelWithHead": ()}\n'
    )
    (package / "model_executor" / "models" / "registry.py").write_text(registry)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert planned(roomy).backend == Backend.VLLM
    config = json.loads((roomy / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for path in roomy.iterdir():
        (other / path.name).symlink_to(path)
    (other / "config.json").unlink()
    for architecture, said in (
        ("LlamaForCausalLN", "it has LlamaForCausalLM"),
        ("BertModelWithHead", "generates no text"),
    ):
        (other / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        with pytest.raises(EngineError) as caught:
            planned(other)
        assert str(other / "config.json") in str(caught.value) and said in str(caught.value)


# -- images, vectors and scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "limits", "images"),
    [
        ({}, {"image": 16, "video": 0}, True),
        ({"limit_mm_per_prompt": {"image": 3}}, {"image": 3, "video": 0}, True),
        ({"limit_mm_per_prompt": {"image": {"count": 2, "width": 64}}}, {"image": {"count": 2, "width": 64}}, True),
        ({"limit_mm_per_prompt": {"image": 0}}, {"image": 0, "video": 0}, False),
    ],
)
def test_a_model_that_takes_images_gets_the_limits_of_requests(
    tmp_path: Path, options: dict[str, Any], limits: dict[str, Any], images: bool
) -> None:
    plan = planned(seeing_model(tmp_path / "model"), **options)
    assert plan.arguments["limit_mm_per_prompt"] == {"video": 0, **limits}
    assert plan.executor_options()["images"] is images


def pooling_plan(checkpoint: Path, **options: Any) -> VllmPoolingPlan:
    _, plan = plan_fitted(configured(backend="vllm", **options), inspect(checkpoint), machine())
    assert isinstance(plan, VllmPoolingPlan)
    return plan


def test_the_files_of_a_model_that_embeds_decide_what_vllm_gets(tmp_path: Path) -> None:
    checkpoint = write_modules(scripted_encoder(tmp_path), mode="cls_token", normalize=False, length=128)
    plan = pooling_plan(checkpoint)
    assert plan.arguments == {
        "model": str(checkpoint),
        "tokenizer": str(checkpoint),
        "runner": "pooling",
        "pooler_config": {"seq_pooling_type": "CLS"},
        "max_num_seqs": 256,
        "max_model_len": 128,
        "max_num_batched_tokens": 2048,
        "tensor_parallel_size": 1,
    }
    given = plan.executor_options()
    assert [given[name] for name in ("task", "activates", "max_seq_len", "max_num_tokens")] == [
        "embed",
        False,
        128,
        2048,
    ]
    assert "first token" in plan.describe()


def test_an_iteration_has_room_for_the_longest_text(tmp_path: Path) -> None:
    checkpoint = scripted_encoder(tmp_path)
    assert pooling_plan(checkpoint, max_num_tokens=256).arguments["max_num_batched_tokens"] == 514
    assert pooling_plan(checkpoint, max_num_tokens=600).arguments["max_num_batched_tokens"] == 600


def test_a_cross_encoder_and_a_model_that_generates_are_pooled_where_the_task_says_so(
    tmp_path: Path, roomy: Path
) -> None:
    scoring = pooling_plan(scripted_encoder(tmp_path, labels=1))
    assert scoring.task is Task.SCORE and "pooler_config" not in scoring.arguments
    decoder = pooling_plan(roomy, task="embed")
    assert decoder.arguments["pooler_config"] == {"seq_pooling_type": "LAST"}


# -- names -------------------------------------------------------------------------------------------------------------


def test_each_version_has_the_arguments_that_are_passed() -> None:
    derived = {"max_num_seqs", "max_model_len", "tensor_parallel_size", "structured_outputs_config", "dtype"}
    targets = {
        target.name
        for effect in backend_named(Backend.VLLM).effects["vllm"].values()
        for target in getattr(effect, "targets", ())
    }
    for version in known_versions():
        assert derived | targets <= set(arguments_of(version)), version


def test_a_version_that_the_table_lacks_gets_what_the_one_before_has() -> None:
    assert arguments_of("0.27.5") == arguments_of("0.27.1")
    assert arguments_of("9.9") == arguments_of(known_versions()[-1])


def test_the_fake_has_all_that_the_executor_uses(tmp_path: Path) -> None:
    for path in json.loads(TABLE.read_text())["seam"]:
        module = tmp_path.joinpath(*path.partition(":")[0].split("."), "__init__.py")
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text((FAKE / "vllm.py").read_text())
    lines = [line for line in differences("0.32.0", tmp_path / "vllm") if not line.startswith("EngineArgs.")]
    assert lines == []
    assert members_of(tmp_path / "vllm", "vllm.v1.engine.core_client:Nothing") is None


@pytest.mark.parametrize(
    ("line", "is_reason"),
    [
        ("(Worker pid=41) ERROR 11-27 10:00:00 [multiproc_executor.py:870] ValueError: Free memory on device", True),
        ("(Worker_TP1 pid=41) ERROR 11-27 10:00:00 [x.py:8] torch.OutOfMemoryError: CUDA out of memory.", True),
        ("(Worker_PP1_TP0 pid=41) ERROR 11-27 10:00:00 [x.py:8] torch.AcceleratorError: CUDA error", True),
        ("(Worker pid=41) ERROR 11-27 10:00:00 [multiproc_executor.py:870] WorkerProc failed to start.", False),
        ("(Worker pid=41) ERROR 11-27 10:00:00 [x.py:870]     raise ValueError(", False),
        ("ERROR 11-27 10:00:00 [x.py:870] ValueError: of this process, which reports it itself", False),
    ],
)
def test_the_errors_of_ranks_are_the_reasons_of_a_load_that_fails(line: str, is_reason: bool) -> None:
    assert (re.search(REASONS, line) is not None) is is_reason


def test_what_is_installed_is_found_without_importing_it() -> None:
    assert (this_machine().vllm is None) == (not any(name.startswith("vllm") for name in _distributions()))


def _distributions() -> set[str]:
    import importlib.metadata

    return {str(each.metadata["Name"]) for each in importlib.metadata.distributions()}
