"""`djl-trtllm size`: flags and status, and what is printed and drawn."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.commands import size_request
from djl_trtllm.commands.size_report import draw
from djl_trtllm.commands.size_request import machines_of, read_request
from djl_trtllm.config import load
from djl_trtllm.engines.hardware import Gpu, GpuState
from djl_trtllm.errors import ModelError, SizingError
from djl_trtllm.finder.trial import TrialLoad
from djl_trtllm.sizing.machines import Machine, of_gpu, of_instance, of_memory
from tests.commands.conftest import BIG, described, report, request
from tests.engines.helpers import write_tensorrt_engine
from tests.finder.conftest import Played, model_with
from tests.sizing.configs import llama, qwen3_32b_fp8
from tests.support.tables import by_table, table


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_MODEL_ID", "OPTION_MODEL_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(size_request, "visible_gpus", lambda environ: ((), None))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(described(tmp_path))


def size(*words: str) -> Any:
    return CliRunner().invoke(app, ["size", *words])


def told(*words: str) -> Any:
    return json.loads(size(*words, "--json").stdout)


def test_the_report_ends_with_the_lines_to_paste(model: str) -> None:
    result = size(model, "--instance", "g5.12xlarge")
    assert result.exit_code == 0
    assert result.stdout.rstrip().splitlines()[-5:] == [
        "option.tensor_parallel_degree=1",
        "option.max_num_tokens=16384",
        "option.max_input_len=4096",
        "option.max_output_len=4096",
        "option.max_rolling_batch_size=256",
    ]
    assert "warning: the weights were counted from config.json" in result.stderr


QWEN_VL = {"model_type": "qwen2_vl", "image_token_id": 9}
PROCESSOR = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 280 * 280}


@pytest.mark.parametrize(
    ("images", "tokens"), [("2", 2 * 100), ("1:5000x5000", 100), ("3:56x84", 3 * 6), ("1:57x83", 6)]
)
def test_images_are_prompt_tokens(tmp_path: Path, images: str, tokens: int) -> None:
    model = described(tmp_path, **QWEN_VL)
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    flags = ("--gpu", "h200", "--isl", "500", "--osl", "50")
    found = told(str(model), *flags, "--images", images)
    assert found["sequences"]["input"] == 500 + tokens


@pytest.mark.parametrize("images", ["0", "two", "1:0x5", "1:5000x10"])
def test_images_that_no_prompt_has_are_refused(tmp_path: Path, images: str) -> None:
    model = described(tmp_path, **QWEN_VL)
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    result = size(str(model), "--gpu", "h200", "--images", images)
    assert result.exit_code != 0 and images in result.stderr


def test_images_of_a_model_that_takes_none_are_refused(model: str) -> None:
    result = size(model, "--gpu", "h200", "--images", "1")
    assert result.exit_code != 0 and "images" in result.stderr


def test_flags_are_options(model: str) -> None:
    flags = ["--tp", "4", "--pp", "2", "--quantize", "fp8", "--isl", "2048", "--osl", "1000", "--kv-cache-dtype", "fp8"]
    found = told(model, "--gpu", "h200", *flags)
    assert (found["tensor_parallel"], found["pipeline_parallel"]) == (4, 2)
    assert (found["sequences"]["input"], found["sequences"]["output"]) == (2048, 1000)
    assert {
        "option.quantize": "fp8",
        "option.kv_cache_dtype": "fp8",
        "option.tensor_parallel_degree": "4",
        "option.pipeline_parallel_degree": "2",
    }.items() <= found["options"].items()
    assert told(model, "--gpu", "h200", "--backend", "pytorch")["options"]["option.backend"] == "pytorch"


@pytest.mark.parametrize("place", ["flag", "file", "environment"])
def test_a_number_that_is_set_is_sized_and_flags_win_over_what_it_widens(
    model: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    flags = ["--gpu", "h200", "--isl", "2048", "--osl", "1000"]
    unset = told(model, *flags)
    if place == "file":
        (Path(model) / "serving.properties").write_text("option.max_num_tokens=50000\n")
    elif place == "environment":
        monkeypatch.setenv("OPTION_MAX_NUM_TOKENS", "50000")
    found = told(model, *flags, *(["--max-num-tokens", "50000"] if place == "flag" else []))
    assert (found["max_num_tokens"], found["options"]["option.max_num_tokens"]) == (50_000, "50000")
    assert found["sequences"]["count"] < unset["sequences"]["count"]
    assert (found["sequences"]["input"], found["sequences"]["output"]) == (2048, 1000)


def test_a_number_above_the_largest_does_not_fit(model: str) -> None:
    largest = told(model, "--gpu", "h100")["largest_max_num_tokens"]
    for number, status in ((largest // 2, 0), (4 * largest, 1)):
        assert size(model, "--gpu", "h100", "--max-num-tokens", str(number), "--strict").exit_code == status
    assert "above the largest that fits on H100, tp 1, " in " ".join(
        size(model, "--gpu", "h100", "--max-num-tokens", str(4 * largest)).stderr.split()
    )


def test_max_seq_len_bounds_the_sequences_that_are_counted(model: str) -> None:
    found = told(model, "--gpu", "h200", "--max-seq-len", "1000", "--isl", "800", "--osl", "800")
    assert (found["sequences"]["input"], found["sequences"]["output"]) == (800, 200)
    assert "option.max_seq_len of 1000" in " ".join(found["warnings"])


CAPACITIES = json.loads((Path(__file__).parents[1] / "sizing" / "kv_capacity.json").read_text())["rows"]
CHECKPOINTS = {"Llama-3.1-8B": llama(max_position_embeddings=131_072), "Qwen3-32B-FP8": qwen3_32b_fp8()}


def test_the_command_reproduces_the_published_capacities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurements reserved 1,000 tokens more per sequence, here of output, and had 2 x input in a step."""
    errors = []
    for gpu, name, ranks, inputs, outputs, fraction, sequences in CAPACITIES:
        (tmp_path / "config.json").write_text(json.dumps(CHECKPOINTS[name]))
        monkeypatch.setenv("OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION", str(fraction))
        lengths = ["--isl", str(inputs), "--osl", str(outputs + 1000), "--max-num-tokens", str(2 * inputs)]
        found = told(str(tmp_path), "--gpu", gpu, "--tp", str(ranks), "--backend", "pytorch", *lengths)
        errors.append(abs(found["sequences"]["count"] / sequences - 1))
    assert len(errors) == 72 and sum(error <= 0.05 for error in errors) >= 71
    assert max(errors) <= 0.08


def test_the_speed_of_a_load_is_predicted_on_request(model: str) -> None:
    load = ("--gpu", "h100", "--isl", "1000", "--osl", "1000")
    assert told(model, *load)["speed"] is None
    few, many = (told(model, *load, "--clients", clients)["speed"] for clients in ("1", "64"))
    assert many["tokens_per_second"] > 10 * few["tokens_per_second"]
    assert (many["clients"], many["isl"], many["osl"], many["running"]) == (64, 1000, 1000, 64)
    short = told(model, "--gpu", "h100", "--isl", "100", "--osl", "100", "--clients", "10000")
    assert short["speed"]["running"] == 256
    lines = size(model, *load, "--clients", "64").stdout
    assert f"{many['tokens_per_second']:,.0f} output tokens per second" in lines
    assert lines.splitlines()[-1].startswith("option.")


def test_a_price_makes_dollars_of_the_speed(model: str) -> None:
    found = told(model, "--instance", "p5.4xlarge", "--clients", "64")
    expected = found["machine"]["usd_per_hour"] / 3600 / found["speed"]["tokens_per_second"] * 1e6
    assert found["speed"]["usd_per_million_tokens"] == pytest.approx(expected)


def test_a_file_of_points_that_cannot_be_read_is_an_error(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTION_ENGINE_CACHE_DIR", str(tmp_path))
    (tmp_path / "points.jsonl").write_text("{}")
    result = size(model, "--gpu", "h100", "--clients", "1")
    assert (result.exit_code, str(tmp_path / "points.jsonl") in result.stderr) == (1, True)


def test_the_other_table_may_be_used(model: str) -> None:
    assert told(model, "--instance", "g5.12xl", "--lmi", "0.27")["measured"] is None


@by_table("flags", "status")
def test_strict_decides_the_status_of_what_does_not_fit(tmp_path: Path, flags: list[str], status: int) -> None:
    assert size(str(described(tmp_path, **BIG)), *flags).exit_code == status


def test_sequences_that_do_not_fit_are_a_warning(model: str) -> None:
    result = size(model, "--gpu", "h100", "--sequences", "100000")
    assert result.exit_code == 0
    assert "warning: 100000 sequences of 1536 tokens do not fit, " in result.stderr


def test_compare_names_the_cheapest(model: str) -> None:
    flags = [model, "--compare", "--sequences", "64", "--isl", "2048", "--osl", "2048"]
    result = size(*flags)
    assert result.exit_code == 0
    assert "cheapest for 64 sequences of 4096 tokens: " in result.stdout
    assert told(*flags)["cheapest"]["sequences"] >= 64


@pytest.mark.parametrize(
    "flags",
    [
        ["--gpu", "h100,h200"],
        ["--gpu", "h100", "--instance", "g5.xlarge"],
        ["--gpu", "h100", "--tp", "1,2"],
        ["--gpu", "h100", "--compare"],
    ],
)
def test_several_machines_or_degrees_are_compared(model: str, flags: list[str]) -> None:
    assert len(told(model, *flags)["candidates"]) >= 2


def test_formula_needs_no_model() -> None:
    flags = ["--formula", "--max-batch", "128", "--max-input", "3700"]
    result = size(*flags)
    assert result.exit_code == 0
    assert "max_num_tokens = 128 * 3700 * 0.2 = 94720" in result.stdout
    assert "reduce by half until it does: 47360, 23680, 11840" in result.stdout
    assert result.stdout.rstrip().endswith("option.max_num_tokens=94720")
    found = told(*flags, "--alpha", "0.1")
    assert (found["max_num_tokens"], found["halvings"][1]) == (47360, 23680)
    small = size("--formula", "--max-batch", "1", "--max-input", "64")
    assert "If the model does not load, a smaller number hardly helps" in small.stdout


@by_table("flags", "message")
def test_errors_say_what_to_write(model: str, flags: str, message: str) -> None:
    result = size(*(model if flag == "MODEL" else flag for flag in flags.split()))
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("changes", [{"num_hidden_layers": "32"}, {"num_attention_heads": 0}, {"hidden_size": [4096]}])
def test_a_config_without_sizes_has_no_estimate(tmp_path: Path, changes: dict[str, object]) -> None:
    result = size(str(described(tmp_path, **changes)), "--gpu", "h100")
    assert result.exit_code == 1 and result.stdout == ""
    assert "config.json does not give the layers, the heads and the hidden size" in " ".join(result.stderr.split())


def test_a_picture_is_drawn_on_request(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = size(model, "--gpu", "h100", "--plot", str(tmp_path / "a.svg"))
    assert result.exit_code == 0 and "wrote" in result.stderr
    assert (tmp_path / "a.svg").stat().st_size > 1000


# -- `djl-trtllm size --measure` --


@pytest.fixture
def measured(tmp_path: Path) -> str:
    return str(model_with(tmp_path / "model"))


def test_the_result_ends_with_the_option_to_paste(measured: str, trials: Played) -> None:
    result = size(measured, "--measure")
    assert result.exit_code == 0
    first, *_, last = result.stdout.splitlines()
    assert first.startswith(f"Maximum: max_num_tokens=24,000 ({len(trials.tried)} trials, ")
    assert last == "option.max_num_tokens=12000"
    assert "trial 1 of at most 20" in result.stderr


def test_json_is_all_of_standard_output(measured: str, trials: Played) -> None:
    found = told(measured, "--measure", "--precision", "0.5")
    assert found["recommended"] == found["max_num_tokens"] // 2
    assert len(found["trials"]) == len(trials.tried)


def test_flags_are_options_the_load_and_the_bound(measured: str, trials: Played) -> None:
    flags = ["--requests", "7", "--request-tokens", "300", "--memory", "5GB", "--kv-cache-dtype", "fp8", "--isl", "500"]
    assert size(measured, "--measure", *flags).exit_code == 0
    spec = trials.specs[0]
    assert (spec.load, spec.memory) == (TrialLoad(7, 300), 5 * 10**9)
    assert {"kv_cache_dtype": "fp8", "max_input_len": "500"}.items() <= spec.options.items()


@by_table("bound", "status", "text", apart=True)
def test_a_bound_that_the_search_does_not_reach_is_said(
    measured: str, trials: Played, bound: int, status: int, text: str
) -> None:
    trials.bound = bound
    result = size(measured, "--measure")
    assert (result.exit_code, text in result.stdout) == (status, True)


def test_another_failure_ends_with_status_1_and_its_reason(measured: str, trials: Played) -> None:
    trials.failing = lambda tokens, spec: True
    result = size(measured, "--measure")
    assert result.exit_code == 1
    assert "error:" in result.stderr and "it is broken" in result.stderr


def test_an_interrupt_says_how_to_go_on(measured: str, trials: Played) -> None:
    trials.interrupted = 3
    result = size(measured, "--measure")
    assert result.exit_code == 130
    assert result.stderr.rstrip().endswith("run the same command again to go on; finished trials are kept")
    trials.interrupted = None
    again = size(measured, "--measure")
    assert "known: 3, going on; --fresh forgets them" in again.stderr
    assert again.stdout.endswith("option.max_num_tokens=12000\n")
    before = len(trials.tried)
    assert size(measured, "--measure", "--fresh").exit_code == 0
    assert len(trials.tried) > before + 3


@by_table("flags", "message", apart=True)
def test_what_a_measurement_cannot_follow_is_refused(measured: str, trials: Played, flags: str, message: str) -> None:
    result = size(measured, "--measure", *flags.split())
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert trials.tried == []


# -- the report --------------------------------------------------------------------------------------------------------


MIB, GIB = 1 << 20, 1 << 30
GEMMA: dict[str, Any] = table(__file__, "GEMMA")
COUNTED = "the weights were counted from config.json: their files are not known, or are not safetensors"
H200 = GpuState(140 * GIB, 139 * GIB, (1,))

# -- what is asked --


def test_options_come_from_flags_and_from_the_models_own_file(tmp_path: Path) -> None:
    path = described(tmp_path)
    (path / "serving.properties").write_text("option.max_input_len=700\noption.tensor_parallel_degree=2\n")
    asked = request(path, max_output_len=300)
    assert (asked.input_len, asked.output_len, asked.length) == (700, 300, 1000)
    assert asked.degree_on(of_gpu("h100")) == 2
    assert asked.settings == {"max_output_len": "300"}


def test_the_models_own_file_may_name_the_checkpoint(tmp_path: Path) -> None:
    described(tmp_path / "weights")
    (tmp_path / "serving.properties").write_text("option.model_id=weights\n")
    assert request(tmp_path).sizes.shape.num_layers == 32
    (tmp_path / "serving.properties").write_text(f"option.model_id={tmp_path / 'weights'}\n")
    assert request(tmp_path).sizes.source == str(tmp_path / "weights")
    described(tmp_path / "draft", num_hidden_layers=2)
    draft = request(tmp_path, speculative_draft_model="draft").draft
    assert draft is not None and len(draft.layers) == 2


def test_a_configuration_file_or_an_archive_names_the_model_too(tmp_path: Path) -> None:
    path = described(tmp_path / "model")
    (path / "serving.properties").write_text("option.max_input_len=700\n")
    assert request(path / "serving.properties").input_len == 700
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.add(path, ".")
    packed = request(tmp_path / "model.tar.gz", engine_cache_dir=tmp_path / "cache")
    assert (packed.input_len, packed.sizes.shape.num_layers) == (700, 32)
    with pytest.raises(ModelError, match="no model at"):
        request(tmp_path / "missing")


@pytest.mark.parametrize(
    ("backend", "engine"), [("auto", "tensorrt"), ("tensorrt",) * 2, ("pytorch",) * 2, ("vllm",) * 2]
)
def test_the_backend_decides_what_is_estimated(tmp_path: Path, backend: str, engine: str) -> None:
    found = request(described(tmp_path), backend=backend).on(of_gpu("h100"), 1)
    assert found.estimate.conditions.backend == engine


@by_table("context", "asked", "counted")
def test_sequences_end_at_the_models_context(
    tmp_path: Path, context: int | None, asked: list[int], counted: list[int] | None
) -> None:
    lengths = dict(zip(("max_input_len", "max_output_len"), asked, strict=False))
    found = request(described(tmp_path, max_position_embeddings=context), **lengths)
    assert [found.input_len, found.output_len] == (counted or asked)
    warned = "sequences of 30000 + 500 tokens are longer than the model's context of 8192: counted are 8191 + 1"
    assert found.shortened == (warned if asked == [30000, 500] else None)


def test_only_checkpoints_of_hugging_face_are_sized(tmp_path: Path) -> None:
    write_tensorrt_engine(tmp_path / "engine", max_batch_size=8)
    with pytest.raises(SizingError, match="compiled TensorRT-LLM engine, which keeps what it was compiled for"):
        request(tmp_path / "engine")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "LlamaForCausalLM", "dtype": "float16"}))
    save_file({"x": numpy.zeros(1)}, tmp_path / "rank0.safetensors")
    with pytest.raises(SizingError, match="TensorRT-LLM checkpoint, which is not read; name the Hugging"):
        request(tmp_path)


@by_table("degree", "groups", "machine", "expected")
def test_a_degree_needs_as_many_gpus(
    tmp_path: Path, degree: object, groups: int, machine: str, expected: int | str
) -> None:
    asked = request(described(tmp_path), tensor_parallel_degree=degree, pipeline_parallel_degree=groups)
    if isinstance(expected, int):
        assert asked.degree_on(of_gpu(machine)) == expected
    else:
        with pytest.raises(SizingError, match=expected):
            asked.degree_on(of_gpu(machine))


def test_the_batch_is_the_one_that_max_num_tokens_raises_to(tmp_path: Path) -> None:
    for asked, expected in ((32, 256), (300, 300)):
        found = request(described(tmp_path), max_rolling_batch_size=asked).on(of_gpu("h100"), 1)
        assert found.estimate.conditions.max_batch_size == expected


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """This machine, with these GPUs as CUDA and as NVML show them."""

    def machine(gpus: tuple[Gpu, ...], states: tuple[GpuState, ...] = ()) -> Machine:
        monkeypatch.setattr(size_request, "visible_gpus", lambda environ: (gpus, None))
        monkeypatch.setattr(size_request, "read_states", lambda: states)
        (found,) = machines_of([], None, [], here=True)
        return found

    return machine


def test_without_flags_it_is_this_machine(here: Callable[..., Machine]) -> None:
    small, large = Gpu("NVIDIA A10G", (8, 6), 23028 * MIB), Gpu("NVIDIA A100", (8, 0), 81920 * MIB)
    machine = here((large, small))
    assert (machine.name, machine.gpu, machine.gpus) == ("this machine", "NVIDIA A10G", 2)
    assert machine.known == of_gpu("a10g").known
    for gpus, message in (((), "this machine has no NVIDIA GPU: name one with --gpu"), ((Gpu(),), "memory .* unknown")):
        with pytest.raises(SizingError, match=message):
            here(gpus)


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ((H200, replace(H200, peers=(0,))), ()),
        ((H200, replace(H200, peers=(0,), free=100 * GIB)), ("other programs use 40.0 of the 140.0 GiB of GPU 1",)),
        ((replace(H200, peers=()),) * 2, ("the GPUs do not reach each other's memory",)),
        ((replace(H200, peers=()),), ()),
    ],
)
def test_memory_in_use_and_missing_links_are_warnings(
    tmp_path: Path, here: Callable[..., Machine], states: tuple[GpuState, ...], says: tuple[str, ...]
) -> None:
    gpu = Gpu("NVIDIA H200", (9, 0), 140 * GIB)
    machine = here((gpu,) * len(states), states)
    assert len(machine.remarks) == len(says)
    assert all(remark.startswith(said) for remark, said in zip(machine.remarks, says, strict=True))
    assert report(described(tmp_path), machine).warnings[-1:] == (machine.remarks[-1:] or (COUNTED,))
    assert here((gpu,) * (len(states) + 1), states).remarks == (), "nothing says which of them CUDA shows"


def test_machines_are_those_that_flags_name() -> None:
    named = machines_of(["h100", "h200:2"], "40GB", ["g5.xlarge"], here=True)
    assert [machine.name for machine in named] == ["H100", "H200", "g5.xlarge", "a GPU of 37.3 GiB"]
    assert machines_of([], None, [], here=False) == []


def test_a_remote_model_is_read_by_its_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from djl_trtllm.sizing.checkpoint import CheckpointSizes

    asked = []

    def read(source: str, **options: object) -> CheckpointSizes:
        asked.append((source, options.get("revision"), options["hub_token"], options["hub_cache"]))
        return CheckpointSizes.from_config(llama(), source)

    monkeypatch.setattr(CheckpointSizes, "read", read)
    monkeypatch.setenv("OPTION_REVISION", "abc")
    monkeypatch.setenv("OPTION_MAX_INPUT_LEN", "77")
    monkeypatch.setenv("OPTION_HF_ACCESS_TOKEN", "hf_own")
    found = read_request("owner/name", {}, "0.28")
    assert (asked, found.input_len, found.draft) == ([("owner/name", "abc", "hf_own", None)], 77, None)
    monkeypatch.setenv("SERVING_DOWNLOAD_DIR", str(tmp_path))
    monkeypatch.setenv("OPTION_SPECULATIVE_DRAFT_MODEL", "owner/draft")
    read_request("owner/name", {}, "0.28")
    kept = ("hf_own", tmp_path / "hub")
    assert asked[1:] == [("owner/name", "abc", *kept), ("owner/draft", None, *kept)]


def test_the_parts_add_up_to_the_gpu(tmp_path: Path) -> None:
    found = report(described(tmp_path), of_gpu("h100"))
    assert sum(found.memory.values()) == of_gpu("h100").memory
    assert all(size >= 0 for size in found.memory.values())
    estimate = found.found.estimate
    assert found.memory["weights"] == estimate.weights
    assert found.memory["kv_cache"] == estimate.kv_bytes(16384)
    assert found.memory["activations"] == estimate.activations(16384) + estimate.logits


def test_the_degree_of_the_machine_is_pasted_and_not_the_one_that_was_asked_for(tmp_path: Path) -> None:
    found = report(described(tmp_path), of_gpu("h100"), 2, tensor_parallel_degree=4, dtype="fp16")
    assert (found.settings["tensor_parallel_degree"], found.settings["dtype"], found.copies) == ("2", "fp16", 1)


def test_the_lines_end_with_options_that_resolve_to_themselves(tmp_path: Path) -> None:
    path = described(tmp_path)
    found = report(path, of_instance("g5.12xlarge"), 4, max_input_len=2048, max_output_len=5000, quantize="fp8")
    pasted = [line for line in found.lines() if line.startswith("option.")]
    assert pasted == found.lines()[-len(pasted) :]
    (path / "serving.properties").write_text("\n".join(pasted))
    config = load(path, {})
    assert config.warnings == ()
    options = config.options
    assert (options.tensor_parallel_degree, options.max_num_tokens, options.quantize) == (4, 16384, "fp8")
    assert (options.max_input_len, options.max_output_len, options.max_rolling_batch_size) == (4096, 5000, 256)
    assert not any(origin.kind == "derived" for origin in config.origins.values())


@by_table("asked", "settings")
def test_what_is_pasted_holds_the_lengths_asked_for(
    tmp_path: Path, asked: dict[str, int], settings: dict[str, str | None]
) -> None:
    found = report(described(tmp_path, **GEMMA), of_instance("g5.12xlarge"), 1, **asked)
    assert found.settings["max_num_tokens"] == "1190"
    assert {name: found.settings.get(name) for name in settings} == settings


@pytest.mark.parametrize(
    ("gpu", "settings", "warned"),
    [("a100", {"quantize": "fp8"}, True), ("l4", {"quantize": "fp8"}, False), ("a100", {}, False)],
)
def test_gpus_without_fp8_are_named_as_such(tmp_path: Path, gpu: str, settings: dict[str, Any], warned: bool) -> None:
    warnings = report(described(tmp_path), of_gpu(gpu), **settings).warnings
    assert any("A100-80GB does not compute in FP8" in text for text in warnings) == warned


@pytest.mark.parametrize(
    ("changes", "machine", "settings", "texts"),
    [
        (
            {},
            of_instance("g5.12xlarge"),
            {},
            (
                ": 8.03 billion parameters in bfloat16, 14.96 GiB, counted from config.json\n",
                "  32 layers, hidden size 4096, 32 heads of which 8 in the KV cache, vocabulary 128256\n",
                "on g5.12xlarge: 4 x A10G with 22.5 GiB, 5.67 USD per hour; tensor parallel 1, TensorRT engine\n",
                "max_num_tokens: 16384, from table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1",
                "the estimate of the largest one is",
            ),
        ),
        (
            {"num_hidden_layers": 1, "hidden_size": 512, "vocab_size": 1000},
            of_memory("80GB"),
            {"backend": "pytorch", "quantize": "fp8", "pipeline_parallel_degree": 2},
            (" million parameters in bfloat16", ", quantised with fp8", "pipeline parallel 2, PyTorch", "pp 2"),
        ),
        ({}, of_memory("80GB"), {}, ("from half of the estimate", "for a GPU of 74.5 GiB, tp 1")),
        ({"num_local_experts": 8}, of_gpu("h100"), {}, ("vocabulary 128256, 8 experts\n",)),
    ],
)
def test_the_model_the_machine_and_the_numbers_origin_are_said(
    tmp_path: Path, changes: dict[str, Any], machine: Machine, settings: dict[str, Any], texts: tuple[str, ...]
) -> None:
    found = "\n".join(report(described(tmp_path, **changes), machine, **settings).lines())
    for text in texts:
        assert text in found


def test_out_of_memory_has_numbers_and_what_helps_and_nothing_to_paste(tmp_path: Path) -> None:
    path = described(tmp_path, **BIG)
    found = report(path, of_instance("g5.48xlarge"), 8)
    text = "\n".join(found.lines())
    assert "option." not in text and "max_num_tokens: none fits" in text
    assert "needed" in text and "the GPU has" in text
    assert "out of memory was measured (table LMI 0.28, LLaMA 3 70B on g5.48xl, tp 8)" in found.warnings[0]
    assert "--compare" in found.warnings[1]
    assert found.settings == {} and found.kv_tokens == found.sequences == found.memory["unused"] == 0
    helped = report(path, of_gpu("h100"), 1)
    assert helped.warnings[1] == "it fits with --tp 2"


def test_an_estimate_that_contradicts_a_measurement_is_reported(tmp_path: Path) -> None:
    found = report(described(tmp_path), of_instance("g5.12xlarge"))
    estimate = found.found.estimate
    tight = replace(estimate, conditions=replace(estimate.conditions, gpu_memory=1 << 30))
    contradicted = replace(found, found=replace(found.found, estimate=tight))
    assert contradicted.found.fits
    assert contradicted.warnings == (
        "the estimate says out of memory where the table has a measurement; the measurement is used",
    )


def test_json_has_the_same_numbers(tmp_path: Path) -> None:
    found = report(described(tmp_path), of_instance("g5.12xlarge"), max_input_len=2048, max_output_len=2048)
    told = found.as_json()
    assert told["fits"] is True
    assert told["max_num_tokens"] == 16384
    assert told["measured"] == {"row": "table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1", "max_num_tokens": 24000}
    assert told["memory_per_gpu"] == found.memory
    assert told["sequences"] == {"input": 2048, "output": 2048, "count": found.sequences}
    assert told["options"]["option.max_num_tokens"] == "16384"
    assert told["machine"]["usd_per_hour"] == 5.672 and "us-east-1" in told["machine"]["price"]
    assert told["model"]["parameters"] == 8030261248
    missing = report(described(tmp_path, **BIG), of_instance("g5.48xlarge"), 8).as_json()
    assert missing["fits"] is False
    assert (missing["max_num_tokens"], missing["origin"], missing["options"]) == (None, None, {})


def test_the_page_has_the_report_as_it_is(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")
    assert "\n".join(report(described(tmp_path), of_instance("g5.12xlarge"), 4).lines()[1:]) in page


# -- the picture --


def test_a_picture_has_parts_numbers_and_capacity(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    found = report(described(tmp_path / "model"), of_instance("g5.12xlarge"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(tmp_path / "size.svg", found)
    text = (tmp_path / "size.svg").read_text()
    parts = ("weights  14.96 GiB", "activations", "overhead", "KV cache", "unused", "GPU  22.5 GiB", "GiB of each GPU")
    for label in (*parts, "tokens in the KV cache", f"sequences of {found.request.length:,} tokens"):
        assert label in text
    assert "model on g5.12xlarge: 4 x A10G with 22.5 GiB, tensor parallel 1" in text
    assert "max_num_tokens 16,384" in text and "largest, measured: 24,000" in text
    assert f"{found.kv_tokens:,} tokens in the KV cache" in text


def test_a_picture_shows_all_numbers_of_tokens_up_to_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, dpi: drawn.append(self))
    found = report(described(tmp_path / "model"), of_instance("g5.12xlarge"))
    draw(tmp_path / "size.svg", found)
    memory, capacity = drawn[0].axes
    most = found.found.maximum
    across, up = capacity.collections[0].get_paths()[0].vertices.T
    assert (across.min(), across.max(), len(set(across))) == (256, most, 96)
    assert up.max() == found.found.estimate.kv_tokens(256)
    assert capacity.get_xlim() == pytest.approx((256, 1.15 * most))
    assert capacity.get_ylim() == pytest.approx((0, 1.15 * up.max()))
    assert sum(bar.get_height() for bar in memory.patches) == pytest.approx(found.conditions.gpu_memory / GIB)
    assert memory.get_gridspec().get_width_ratios() == (1, 2.5)
    legend = memory.get_legend()
    assert [text.get_text().split("  ")[0] for text in legend.get_texts()[::5]] == ["unused", "GPU"], (
        "from the top of the bar"
    )
    assert not legend.get_frame_on()


def test_out_of_memory_is_drawn_too_and_other_files_and_places_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report(described(tmp_path / "model", **BIG), of_instance("g5.48xlarge"), 8)
    draw(tmp_path / "size.png", found)
    assert (tmp_path / "size.png").read_bytes().startswith(b"\x89PNG")
    for name, message in (
        ("size.pdf", r"expected a name that ends with \.png or \.svg"),
        ("no/size.png", "cannot write"),
    ):
        with pytest.raises(SizingError, match=rf"{name}: {message}"):
            draw(tmp_path / name, found)


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(SizingError, match=r"pip install 'djl-trtllm\[plot\]'"):
        draw(tmp_path / "size.png", report(described(tmp_path / "model"), of_gpu("h100")))
