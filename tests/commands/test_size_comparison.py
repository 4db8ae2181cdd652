"""What is printed of one model on many machines."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.commands.size_comparison import Comparison
from djl_trtllm.sizing.machines import of_gpu, of_instance
from tests.commands.sized import BIG, described, request


def test_the_cheapest_instance_for_64_sequences_of_4k_is_named(tmp_path: Path) -> None:
    asked = request(described(tmp_path, **BIG), max_input_len=2048, max_output_len=2048)
    found = Comparison(asked, [], [], 64)
    best = found.cheapest
    assert best is not None
    assert found.answer == (
        f"cheapest for 64 sequences of 4096 tokens: {best.machine.name} ({best.machine.gpus} x {best.machine.gpu}), tp "
        f"{best.tensor_parallel}, {best.price:.2f} USD per hour: {best.sequences} sequences"
    )
    assert found.answer in found.lines()
    assert found.answer in (Path(__file__).parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")
    told = found.as_json()
    assert told["cheapest"]["machine"]["name"] == best.machine.name
    assert told["cheapest"]["sequences"] == best.sequences
    assert told["sequences_wanted"] == 64 and told["length"] == 4096


def test_of_machines_with_the_same_gpus_the_cheapest_is_shown(tmp_path: Path) -> None:
    found = Comparison(request(described(tmp_path)), [], [], None)
    shown = [(one.machine.gpu, one.machine.gpus) for one in found.shown]
    assert len(shown) == len(set(shown))
    assert next(one.machine.name for one in found.shown if one.machine.gpu == "L40S") == "g6e.xlarge"


def test_named_machines_are_all_shown_with_all_degrees(tmp_path: Path) -> None:
    machines = [of_gpu("h100"), of_instance("g5.48xlarge")]
    found = Comparison(request(described(tmp_path, **BIG)), machines, [4, 8], None)
    assert [(one.machine.name, one.tensor_parallel) for one in found.shown] == [
        ("g5.48xlarge", 8),
        ("g5.48xlarge", 4),
        ("H100", 8),
        ("H100", 4),
    ]
    text = "\n".join(found.lines())
    assert "out of memory" in text and "estimate" in text
    assert found.answered
    least = min((one for one in found.all if one.sequences), key=lambda one: one.tensor_parallel)
    assert found.answer == (
        f"smallest for the model: 4 x H100, tp 4: {least.sequences} sequences; none of these machines with a price "
        "holds as much"
    )
    assert any(line.startswith("Prices: ") for line in found.lines())
    only_gpus = Comparison(request(described(tmp_path, **BIG)), machines[:1], [4, 8], None)
    assert only_gpus.answer == f"smallest for the model: 4 x H100, tp 4: {least.sequences} sequences"
    assert not any(line.startswith("Prices: ") for line in only_gpus.lines())


def test_what_none_holds_is_said_with_the_most(tmp_path: Path) -> None:
    asked = request(described(tmp_path, **BIG))
    none = Comparison(asked, [of_instance("g5.48xlarge")], [], None)
    assert none.answer.startswith("the model: none of these machines holds it; quantise")
    assert not none.answered and none.as_json()["cheapest"] is None
    few = Comparison(asked, [of_instance("p4d.24xlarge")], [], 10**6)
    assert few.answer.startswith("1000000 sequences of 1536 tokens: none of these machines holds them; the most is ")
    assert few.answer.endswith(" on p4d.24xlarge")


def test_measured_numbers_are_marked(tmp_path: Path) -> None:
    found = Comparison(request(described(tmp_path)), [of_instance("g5.12xlarge")], [1], None)
    assert "measured" in found.lines()[3]
    assert found.as_json()["candidates"][0]["origin"].startswith("table LMI 0.28")
