"""`djl-trtllm advise`: which machines hold a load, cheapest first, and why the others do not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.config import load
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.machines import instance_named
from djl_trtllm.sizing.points import Point, fingerprint, write_point
from tests.commands.conftest import BIG, described
from tests.sizing.configs import llama, qwen3_32b_fp8
from tests.support.tables import by_table

LOAD = ("--clients", "64", "--isl", "2048", "--osl", "256")
FEW = ("--instance", "g4dn.xlarge,g6.xlarge,g6e.xlarge,p5.4xlarge,p4d.24xlarge")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_MODEL_ID", "OPTION_MODEL_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPTION_ENGINE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(described(tmp_path / "model"))


def advise(*words: str) -> Any:
    return CliRunner().invoke(app, ["advise", *words])


def answered(*words: str) -> Any:
    return json.loads(advise(*words, "--json").stdout)


def test_the_machines_that_hold_a_load_come_cheapest_first_with_lines_to_paste(model: str) -> None:
    result = advise(model, *LOAD, "--ttft", "1s")
    assert result.exit_code == 0
    table, pasted, failing, _ = result.stdout.split("\n\n")[1:]
    prices = [float(line.split()[-2]) for line in table.splitlines()[1:] if " x " in line]
    assert prices == sorted(prices)
    head = ["machine", "GPUs", "setting", "tok/s", "stream", "TTFT", "USD/h", "USD/M"]
    assert table.splitlines()[0].split() == head
    assert table.splitlines()[1].startswith("g6e.xlarge")
    held = len(answered(model, *LOAD, "--ttft", "1s")["holding"])
    assert len(prices) == 10 and table.splitlines()[11:] == [f"and {held - 10} more"]
    lines = [line for line in pasted.splitlines() if line.startswith("option.")]
    config = load(None, {}, arguments=lines)
    assert config.options.tensor_parallel_degree == 1
    assert config.options.max_input_len >= 2048
    assert "g5.xlarge" in failing


def test_each_machine_is_named_once_held_or_with_its_reason(model: str) -> None:
    budget = str(instance_named("p5.4xlarge").hourly_price)
    found = answered(model, *LOAD, "--ttft", "1s", "--stream", "20", "--budget", budget, *FEW)
    held = [one["machine"] for one in found["holding"]]
    reasons = {one["machine"]: one["reason"] for one in found["not_holding"]}
    assert held == ["p5.4xlarge"]
    assert set(held) | set(reasons) == set(FEW[1].split(","))
    assert "out of memory" in reasons["g4dn.xlarge"]
    assert "the first token takes" in reasons["g6.xlarge"]
    waiting = re.search(r"where (\d+) of 64 requests wait for room", reasons["g6.xlarge"])
    assert waiting is not None and int(waiting[1]) < 64
    assert reasons["g6e.xlarge"].startswith("a stream has")
    assert reasons["p4d.24xlarge"] == "it costs 21.96 USD per hour"


def test_of_machines_with_the_same_gpus_one_is_named(model: str) -> None:
    found = answered(model, "--instance", "g6e.2xlarge,g6e.xlarge")
    assert [one["machine"] for one in found["holding"]] == ["g6e.xlarge"]
    assert found["not_holding"] == []


def test_the_reason_is_that_of_a_setting_that_fits_if_one_does(tmp_path: Path) -> None:
    big = str(described(tmp_path, **BIG))
    found = answered(big, "--instance", "p5.4xlarge", "--ttft", "1ms", "--stream", "1000")
    assert found["not_holding"][0]["reason"].startswith("the first token takes")


@pytest.mark.parametrize(
    ("options", "flags"), [("option.pipeline_parallel_degree=2\n", ()), ("", ("--tp", "8")), ("", ("--tp", "3"))]
)
def test_a_machine_with_too_few_gpus_is_named_too(model: str, options: str, flags: tuple[str, ...]) -> None:
    (Path(model) / "serving.properties").write_text(options)
    found = answered(model, "--instance", "g6.xlarge,p5.4xlarge,g6.2xlarge", *flags)
    assert [one["machine"] for one in found["not_holding"]] == ["g6.xlarge", "p5.4xlarge"]
    assert "its 1 GPU cannot" in found["not_holding"][0]["reason"]
    (any_number,) = answered(model, "--gpu", "h100", "--tp", "3")["not_holding"]
    assert any_number["reason"].startswith("its GPUs cannot")


def test_all_clients_are_served_by_as_many_copies_as_there_is_room_for(model: str) -> None:
    (found,) = answered(model, *LOAD, "--instance", "g6e.12xlarge", "--tp", "1")["holding"]
    assert (found["copies"], found["speed_of_a_copy"]["clients"]) == (4, 16)
    assert found["tokens_per_second"] == pytest.approx(4 * found["speed_of_a_copy"]["tokens_per_second"])
    dollars = found["usd_per_hour"] / 3600 / found["tokens_per_second"] * 1e6
    assert found["usd_per_million_tokens"] == pytest.approx(dollars)
    (uneven,) = answered(model, "--clients", "10", "--instance", "g6e.12xlarge", "--tp", "1")["holding"]
    assert (uneven["copies"], uneven["speed_of_a_copy"]["clients"]) == (4, 3)
    (alone,) = answered(model, "--clients", "2", "--instance", "g6e.12xlarge", "--tp", "1")["holding"]
    assert (alone["copies"], alone["speed_of_a_copy"]["clients"]) == (2, 1)
    pasted = advise(model, *LOAD, "--instance", "g6e.12xlarge", "--tp", "1").stdout.split("\n\n")[2].splitlines()
    assert any("--replicas 4" in line for line in pasted)
    assert all(line.startswith(("# ", "option.")) and len(line) <= 80 for line in pasted), "a terminal would wrap it"


def test_weights_stay_as_they_are_unless_only_fp8_holds_the_load(model: str) -> None:
    def quantised(*words: str) -> list[Any]:
        found = answered(model, *LOAD, "--instance", "p5.4xlarge", *words)["holding"]
        return [one["options"].get("option.quantize") for one in found]

    assert quantised() == [None]
    assert quantised("--stream", "42") == ["fp8"]
    assert quantised("--stream", "42", "--backend", "pytorch") == []
    assert quantised("--quantize", "int8", "--stream", "30") == ["int8"]


def test_a_checkpoint_that_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    path = tmp_path / "quantised"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(qwen3_32b_fp8()))
    found = answered(str(path), "--gpu", "h200")["holding"]
    assert [one["options"].get("option.quantize") for one in found] == [None]


def test_gpus_without_a_number_are_as_few_as_hold_it(tmp_path: Path) -> None:
    big = str(described(tmp_path, **BIG))
    (found,) = answered(big, "--gpu", "h100")["holding"]
    degree, method = (found["options"][f"option.{name}"] for name in ("tensor_parallel_degree", "quantize"))
    assert (degree, method) == ("1", "fp8")
    (found,) = answered(big, "--backend", "pytorch", "--gpu", "h100")["holding"]
    assert found["options"]["option.tensor_parallel_degree"] == "2"
    (found,) = answered(big, "--backend", "pytorch", "--gpu", "h100", "--stream", "40")["holding"]
    assert found["options"]["option.tensor_parallel_degree"] == "4"
    assert "4 x H100" in advise(big, "--backend", "pytorch", "--gpu", "h100", "--stream", "40").stdout


def test_where_none_holds_it_each_reason_is_said_and_nothing_is_there_to_paste(model: str) -> None:
    machines = ("--instance", "g6e.xlarge,p5.4xlarge", "--tp", "1")
    result = advise(model, *LOAD, "--ttft", "20ms", "--stream", "100", "--budget", "1", *machines)
    assert result.exit_code == 1
    assert "option." not in result.stdout
    for line in result.stdout.splitlines()[5:7]:
        assert all(reason in line for reason in ("the first token takes", "a stream has", "it costs"))


def test_one_output_token_has_no_speed_of_a_stream(model: str) -> None:
    found = answered(model, "--osl", "1", "--gpu", "h100")["holding"][0]["speed_of_a_copy"]
    assert found["tokens_per_second_per_stream"] is None
    assert "inf" not in advise(model, "--osl", "1", "--gpu", "h100").stdout


def test_a_host_that_does_not_hold_the_checkpoint_is_a_reason(tmp_path: Path) -> None:
    big = str(described(tmp_path, **BIG, torch_dtype="float32"))
    found = answered(big, "--instance", "g6e.xlarge")
    assert found["not_holding"][0]["reason"] == "the host's memory of 32 GiB does not hold the checkpoint"


def test_a_gpu_of_which_only_the_memory_is_known_has_no_speed(model: str) -> None:
    found = answered(model, "--gpu-memory", "80GB", "--gpu", "h100")
    assert [one["machine"] for one in found["holding"]] == ["H100"]
    assert found["not_holding"][0]["reason"].startswith("the GPU is unknown")


def test_a_measured_point_moves_the_answer(model: str, tmp_path: Path) -> None:
    before = answered(model, *LOAD, "--instance", "p5.4xlarge", "--tp", "1")["holding"][0]
    sizes = CheckpointSizes.from_config(llama())
    same = {"version": "1.0", "gpu": "H100", "gpus": 1, "precision": "bfloat16", "isl": 2048, "osl": 256, "clients": 64}
    measured = {"tokens_per_second": 2 * before["tokens_per_second"], "command": "bench", "date": "2026-11-27"}
    point = Point(model=fingerprint(sizes), name="m", engine="tensorrt_llm", **same, **measured)  # type: ignore[arg-type]
    write_point(tmp_path / "cache", point)
    after = answered(model, *LOAD, "--instance", "p5.4xlarge", "--tp", "1")["holding"][0]
    assert after["tokens_per_second"] == pytest.approx(measured["tokens_per_second"])
    assert "tensorrt_llm 1.0, bench, 2026-11-27" in after["speed_of_a_copy"]["corrected_by"]
    for others in (("p5.4xlarge", "--backend", "vllm"), ("p5.4xlarge", "--quantize", "fp8"), ("g6e.xlarge",)):
        other = answered(model, *LOAD, "--tp", "1", "--instance", *others)["holding"][0]
        assert other["speed_of_a_copy"]["corrected_by"] is None


@by_table("flags", "message")
def test_what_cannot_be_advised_on_is_refused(model: str, flags: list[str], message: str) -> None:
    result = advise(model, *flags)
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n  ", " ")


def test_no_speed_is_predicted_of_a_model_that_does_not_generate(tmp_path: Path) -> None:
    encoder = described(tmp_path / "encoder", model_type="bert")
    result = advise(str(encoder), "--isl", "100", "--osl", "10", "--gpu", "l4")
    assert (result.exit_code, "embed" in result.stderr) == (1, True)


KEYS = Path(__file__).with_name("json_keys.json")


def keys_of(value: Any) -> Any:
    """The keys of objects, and those of the first object of a list."""
    if isinstance(value, dict):
        return {name: keys_of(each) for name, each in value.items()}
    return [keys_of(value[0])] if isinstance(value, list) and value else "[]" if isinstance(value, list) else ""


def test_json_has_the_keys_that_programs_read(model: str) -> None:
    """`json_keys.json` has them; UPDATE_GOLDEN=1 writes it where a change was meant."""
    (Path(model) / "serving.properties").write_text("option.dtype=fp16\n")
    machine, lengths = ("--instance", "g5.12xlarge"), ("--isl", "1000", "--osl", "100")
    commands = {
        "size": [*machine, *lengths, "--clients", "8"],
        "size --compare": ["--compare", "--sequences", "8", *lengths],
        "size --formula": ["--max-batch", "8", "--max-input", "512", "--formula"],
        "advise": ["--instance", "g6.xlarge,g5.12xlarge", *LOAD, "--ttft", "1s"],
    }
    found: dict[str, Any] = {}
    for name, flags in commands.items():
        words = [name.split()[0], *flags, "--json"] + ([] if "formula" in name else [model])
        found[name] = keys_of(json.loads(CliRunner().invoke(app, words).stdout))
    if os.environ.get("UPDATE_GOLDEN"):
        KEYS.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(KEYS.read_text())
