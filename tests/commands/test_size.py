"""`djl-trtllm size`: flags, status and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.engines import gpu
from tests.commands.sized import BIG, described

runner = CliRunner()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_MODEL_ID", "OPTION_MODEL_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu, "visible_gpus", lambda environ: ((), None))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(described(tmp_path))


@pytest.fixture
def big(tmp_path: Path) -> str:
    return str(described(tmp_path / "big", **BIG))


def test_the_report_ends_with_the_lines_to_paste(model: str) -> None:
    result = runner.invoke(app, ["size", model, "--instance", "g5.12xlarge"])
    assert result.exit_code == 0
    assert result.stdout.rstrip().splitlines()[-5:] == [
        "option.tensor_parallel_degree=1",
        "option.max_num_tokens=16384",
        "option.max_input_len=4096",
        "option.max_output_len=4096",
        "option.max_rolling_batch_size=256",
    ]
    assert "warning: the weights were counted from config.json" in result.stderr


def test_flags_are_options(model: str) -> None:
    flags = ["--gpu", "h200", "--tp", "4", "--pp", "2", "--quantize", "fp8", "--isl", "2048", "--osl", "1000"]
    result = runner.invoke(app, ["size", model, *flags, "--kv-cache-dtype", "fp8", "--json"])
    told = json.loads(result.stdout)
    assert (told["tensor_parallel"], told["pipeline_parallel"]) == (4, 2)
    assert told["sequences"]["input"] == 2048 and told["sequences"]["output"] == 1000
    options = told["options"]
    assert options["option.quantize"] == "fp8" and options["option.kv_cache_dtype"] == "fp8"
    assert options["option.tensor_parallel_degree"] == "4" and options["option.pipeline_parallel_degree"] == "2"
    pytorch = json.loads(runner.invoke(app, ["size", model, "--gpu", "h200", "--backend", "pytorch", "--json"]).stdout)
    assert pytorch["options"]["option.backend"] == "pytorch"


def test_the_other_table_may_be_used(model: str) -> None:
    result = runner.invoke(app, ["size", model, "--instance", "g5.12xl", "--lmi", "0.27", "--json"])
    assert json.loads(result.stdout)["measured"] is None
    result = runner.invoke(app, ["size", model, "--instance", "g5.12xl", "--lmi", "0.26"])
    assert result.exit_code == 1 and "LMI 0.26: expected a version with a table" in result.stderr


@pytest.mark.parametrize(
    ("flags", "status"), [([], 0), (["--strict"], 1), (["--strict", "--json"], 1), (["--tp", "4", "--gpu", "h100"], 0)]
)
def test_strict_decides_the_status_of_what_does_not_fit(big: str, flags: list[str], status: int) -> None:
    machine = [] if "--gpu" in flags else ["--instance", "g5.48xlarge", "--tp", "8"]
    result = runner.invoke(app, ["size", big, *machine, *flags])
    assert result.exit_code == status


def test_sequences_that_do_not_fit_are_a_warning_or_with_strict_a_failure(model: str) -> None:
    flags = ["size", model, "--gpu", "h100", "--sequences", "100000"]
    result = runner.invoke(app, flags)
    assert result.exit_code == 0
    assert "warning: 100000 sequences of 1536 tokens do not fit, " in result.stderr
    assert runner.invoke(app, [*flags, "--strict"]).exit_code == 1
    assert runner.invoke(app, ["size", model, "--gpu", "h100", "--sequences", "1", "--strict"]).exit_code == 0


def test_compare_names_the_cheapest(model: str) -> None:
    flags = ["size", model, "--compare", "--sequences", "64", "--isl", "2048", "--osl", "2048"]
    result = runner.invoke(app, flags)
    assert result.exit_code == 0
    assert "cheapest for 64 sequences of 4096 tokens: " in result.stdout
    told = json.loads(runner.invoke(app, [*flags, "--json"]).stdout)
    assert told["cheapest"]["sequences"] >= 64
    assert runner.invoke(app, [*flags[:3], "--sequences", "10000000", "--strict"]).exit_code == 1


@pytest.mark.parametrize(
    "flags", [["--gpu", "h100,h200"], ["--gpu", "h100", "--instance", "g5.xlarge"], ["--gpu", "h100", "--tp", "1,2"]]
)
def test_several_machines_or_degrees_are_compared(model: str, flags: list[str]) -> None:
    told = json.loads(runner.invoke(app, ["size", model, *flags, "--json"]).stdout)
    assert len(told["candidates"]) >= 2


def test_formula_needs_no_model() -> None:
    flags = ["size", "--formula", "--max-batch", "128", "--max-input", "3700"]
    result = runner.invoke(app, flags)
    assert result.exit_code == 0
    assert "max_num_tokens = 128 * 3700 * 0.2 = 94720" in result.stdout
    assert "reduce by half until it does: 47360, 23680, 11840" in result.stdout
    assert result.stdout.rstrip().endswith("option.max_num_tokens=94720")
    told = json.loads(runner.invoke(app, [*flags, "--alpha", "0.1", "--json"]).stdout)
    assert (told["max_num_tokens"], told["halvings"][1]) == (47360, 23680)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--formula"], "--formula needs --max-batch N and --max-input N"),
        (["--formula", "--max-batch", "1", "--max-input", "1", "--alpha", "0"], "alpha 0: expected more than 0"),
        (
            ["--formula", "--max-batch", "1", "--max-input", "1", "--alpha", "1.5"],
            "alpha 1.5: expected more than 0",
        ),
        ([], "no model given"),
        (["MODEL"], "this machine has no NVIDIA GPU: name one with --gpu"),
        (["MODEL", "--gpu", "h201"], "--gpu h201: expected a GPU: did you mean h20 or h200"),
        (["MODEL", "--instance", "m5.large"], "--instance m5.large: expected an AWS instance type"),
        (["MODEL", "--gpu-memory", "80"], "--gpu-memory 80: 80 bytes are no memory of a GPU; write a unit"),
        (["MODEL", "--gpu", "h100", "--like", "vllm"], "--like vllm: expected trtllm-bench"),
        (["MODEL", "--gpu", "h100,h200", "--like", "trtllm-bench"], "--like prints one heuristic for one machine"),
        (["MODEL", "--gpu", "h100", "--like", "trtllm-bench", "--strict"], "leave out --compare, --plot, --sequences"),
        (["MODEL", "--gpu", "h100", "--alpha", "0.1"], "--alpha: a flag of --formula"),
        (["MODEL", "--gpu", "h100", "--formula"], "--formula does not use MODEL, --gpu: leave out"),
        (["--check-tables", "--lmi", "0.27"], "--check-tables does not use --lmi"),
        (["MODEL", "--gpu", "h100", "--tp", "many"], "option.tensor_parallel_degree=many"),
        (["MODEL", "--gpu", "h100", "--tp", "1,many"], "--tp 1,many: expected numbers"),
        (["MODEL", "--gpu", "h100", "--quantize", "fp3"], "option.quantize=fp3"),
        (["MODEL", "--compare", "--plot", "x.png"], "--plot draws one model on one machine"),
        (["/nowhere", "--gpu", "h100"], "/nowhere"),
    ],
)
def test_errors_say_what_to_write(model: str, flags: list[str], message: str) -> None:
    result = runner.invoke(app, ["size", *(model if flag == "MODEL" else flag for flag in flags)])
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n  ", " ").replace("\n", " ")


def test_a_small_guess_is_not_halved() -> None:
    result = runner.invoke(app, ["size", "--formula", "--max-batch", "1", "--max-input", "64"])
    assert "If the model does not load, a smaller number hardly helps" in result.stdout


@pytest.mark.parametrize("changes", [{"num_hidden_layers": "32"}, {"num_attention_heads": 0}, {"hidden_size": [4096]}])
def test_a_config_without_sizes_has_no_estimate(tmp_path: Path, changes: dict[str, object]) -> None:
    result = runner.invoke(app, ["size", str(described(tmp_path, **changes)), "--gpu", "h100"])
    assert result.exit_code == 1 and result.stdout == ""
    assert "config.json does not give the layers, the heads and the hidden size" in " ".join(result.stderr.split())


def test_the_heuristic_of_trtllm_bench(model: str) -> None:
    flags = ["size", model, "--gpu", "h100", "--isl", "128", "--osl", "128", "--like", "trtllm-bench"]
    result = runner.invoke(app, flags)
    assert result.exit_code == 0
    assert "trtllm-bench's heuristic for" in result.stdout and "option.max_rolling_batch_size=" in result.stdout
    told = json.loads(runner.invoke(app, [*flags, "--json"]).stdout)
    assert f"option.max_num_tokens={told['max_num_tokens']}" in result.stdout
    assert told["max_batch_size"] >= 64
    small = runner.invoke(app, ["size", model, "--gpu-memory", "20GB", "--isl", "128", "--like", "trtllm-bench"])
    assert "warning:" in small.stderr


def test_the_tables_are_checked() -> None:
    result = runner.invoke(app, ["size", "--check-tables"])
    assert result.exit_code == 0 and "LLaMA 3 70B" in result.stdout


def test_a_picture_is_drawn_on_request(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = runner.invoke(app, ["size", model, "--gpu", "h100", "--plot", str(tmp_path / "a.svg")])
    assert result.exit_code == 0 and "wrote" in result.stderr
    assert (tmp_path / "a.svg").stat().st_size > 1000
