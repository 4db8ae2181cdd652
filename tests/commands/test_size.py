"""`djl-trtllm size`: flags, status and output; `size_report` has what is printed and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.engines import hardware
from djl_trtllm.finder.trial import TrialLoad
from tests import sizing
from tests.commands.conftest import BIG, described
from tests.finder.conftest import Played, model_with
from tests.sizing.configs import llama, qwen3_32b_fp8
from tests.support.tables import by_table


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_MODEL_ID", "OPTION_MODEL_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "visible_gpus", lambda environ: ((), None))


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


CAPACITIES = json.loads((Path(sizing.__file__).parent / "kv_capacity.json").read_text())["rows"]
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
    (tmp_path / "points.json").write_text("{}")
    result = size(model, "--gpu", "h100", "--clients", "1")
    assert (result.exit_code, str(tmp_path / "points.json") in result.stderr) == (1, True)


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
    "flags", [["--gpu", "h100,h200"], ["--gpu", "h100", "--instance", "g5.xlarge"], ["--gpu", "h100", "--tp", "1,2"]]
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


@by_table("bound", "status", "text")
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


@by_table("flags", "message")
def test_what_a_measurement_cannot_follow_is_refused(measured: str, trials: Played, flags: str, message: str) -> None:
    result = size(measured, "--measure", *flags.split())
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert trials.tried == []
