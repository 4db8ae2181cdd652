"""One model on many machines: the order, the cheapest, the smallest, and what none holds."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.commands.comparison import Comparison, first_of_each, sized
from djl_trtllm.commands.size_report import degrees_of
from djl_trtllm.sizing.machines import of_gpu, of_instance
from tests.commands.conftest import BIG, described, request


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
    head = ["machine", "GPUs", "tp", "weights/GPU", "max_num_tokens", "KV", "tokens", "sequences", "USD/h"]
    assert found.lines()[2].split() == head
    assert found.answered
    small = Comparison(request(described(tmp_path)), [of_instance("g5.12xlarge")], [1], None)
    assert "measured" in small.lines()[3]
    assert small.as_json()["candidates"][0]["origin"].startswith("table LMI 0.28")
    least = min((one for one in found.all if one.sequences), key=lambda one: one.tensor_parallel)
    assert found.answer == (
        f"smallest for the model: 4 x H100, tp 4: {least.sequences} sequences; none of these machines with a price "
        "holds as much"
    )
    assert any(line.startswith("Prices: ") for line in found.lines())
    only_gpus = Comparison(request(described(tmp_path, **BIG)), machines[:1], [4, 8], None)
    assert only_gpus.answer == f"smallest for the model: 4 x H100, tp 4: {least.sequences} sequences"
    assert not any(line.startswith("Prices: ") for line in only_gpus.lines())


def test_a_degree_divides_the_heads_and_has_its_gpus(tmp_path: Path) -> None:
    asked = request(described(tmp_path / "small"))
    assert degrees_of(of_instance("g5.12xlarge"), asked) == [1, 2, 4]
    assert degrees_of(of_gpu("h100"), asked) == [1, 2, 4, 8]
    assert degrees_of(of_gpu("h100:4"), asked, (2, 3, 4, 8)) == [2, 4]
    falcon = described(tmp_path / "falcon", num_attention_heads=71, hidden_size=4544, num_key_value_heads=1)
    assert degrees_of(of_gpu("h100"), request(falcon)) == [1]


def test_machines_are_in_order_of_price_and_then_of_capacity_or_of_what_comes_nearest(tmp_path: Path) -> None:
    machines = [of_gpu("h100"), of_instance("g6e.12xlarge"), of_instance("g5.12xlarge")]
    found = sized(request(described(tmp_path / "small")), machines, (1, 4))
    names = ["g5.12xlarge"] * 2 + ["g6e.12xlarge"] * 2 + ["H100"] * 2
    assert [(one.machine.name, one.tensor_parallel) for one in found] == list(zip(names, [4, 1] * 3, strict=True))
    big = request(described(tmp_path / "big", **BIG))
    none = sized(big, [of_instance("g5.12xlarge")])
    assert [(one.tensor_parallel, one.sequences) for one in none] == [(4, 0), (2, 0), (1, 0)]
    some = sized(big, [of_instance("p4d.24xlarge")])
    assert some[0].found.fits and not some[-1].found.fits


def test_the_cheapest_holds_as_many_as_asked_and_has_a_price(tmp_path: Path) -> None:
    big = request(described(tmp_path / "big", **BIG))
    found = Comparison(big, [], [], 64)
    best = found.cheapest
    assert best is not None and best.price is not None and best.sequences >= 64
    assert all(one.sequences < 64 for one in found.all if one.price is not None and one.price < best.price)
    assert Comparison(big, [], [], 10**9).cheapest is None
    dear = Comparison(request(described(tmp_path)), [of_gpu("h100"), of_instance("p5e.48xlarge")], [], None)
    assert dear.answered and dear.cheapest is None


def test_types_whose_host_cannot_hold_the_checkpoint_are_left_out(tmp_path: Path) -> None:
    """g6.xlarge has 16 GiB; a model of 18 GiB needs the next one."""
    asked = request(described(tmp_path, num_hidden_layers=40))
    machines = [of_instance(name) for name in ("g6e.xlarge", "g6.xlarge", "g6.2xlarge")]
    found = first_of_each(one for one in sized(asked, machines, (1,)) if one.loads)
    assert [one.machine.name for one in found] == ["g6.2xlarge", "g6e.xlarge"]
    best = Comparison(asked, machines, [1], None).cheapest
    assert best is not None and best.machine.name != "g6.xlarge"


def test_the_smallest_has_the_least_memory_of_all_its_gpus(tmp_path: Path) -> None:
    asked = request(described(tmp_path))
    (few,) = sized(asked, [of_gpu("l4")], (1,))
    for machines, sequences, expected in (
        ("h100 l4", 1, "1 x L4"),
        ("h100 l4", few.sequences, "1 x L4"),
        ("h100 l4", few.sequences + 1, "2 x L4"),
        ("l4 a100-40gb", few.sequences + 1, "1 x A100-40GB"),
    ):
        found = Comparison(asked, [of_gpu(name) for name in machines.split()], [1, 2], sequences)
        assert f"tokens: {expected}, tp" in found.answer


def test_what_none_holds_is_said_with_the_most(tmp_path: Path) -> None:
    asked = request(described(tmp_path, **BIG))
    none = Comparison(asked, [of_instance("g5.48xlarge")], [], None)
    assert none.answer.startswith("the model: none of these machines holds it; quantise")
    assert not none.answered and none.as_json()["cheapest"] is None
    assert "divides its heads" in Comparison(asked, [of_instance("g5.48xlarge")], [3], None).answer
    few = Comparison(asked, [of_instance("p4d.24xlarge")], [], 10**6)
    assert few.answer.startswith("1000000 sequences of 1536 tokens: none of these machines holds them; the most is ")
    assert few.answer.endswith(" on p4d.24xlarge")
