"""Which machine is the cheapest that holds what is asked for."""

from __future__ import annotations

from dataclasses import replace

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.comparison import best_of_each, candidates, cheapest, degrees_of, smallest
from djl_trtllm.sizing.conditions import Conditions
from djl_trtllm.sizing.machines import Machine, aws_machines, of_gpu, of_instance
from djl_trtllm.sizing.recommendation import Recommendation, recommend
from tests.sizing.configs import llama

SMALL = CheckpointSizes.from_config(llama())
BIG = CheckpointSizes.from_config(
    llama(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
)


def size_of(sizes: CheckpointSizes, asked: list[str] | None = None):  # type: ignore[no-untyped-def]
    def size(machine: Machine, degree: int) -> Recommendation:
        if asked is not None:
            asked.append(f"{machine.name}/{degree}")
        return recommend(sizes, Conditions(machine.memory, degree), machine.known)

    return size


def test_a_degree_divides_the_heads_and_has_its_gpus() -> None:
    assert degrees_of(of_instance("g5.12xlarge"), SMALL) == [1, 2, 4]
    assert degrees_of(of_gpu("h100"), SMALL) == [1, 2, 4, 8]
    falcon = CheckpointSizes.from_config(llama(num_attention_heads=71, hidden_size=4544, num_key_value_heads=1))
    assert degrees_of(of_gpu("h100"), falcon) == [1]
    assert degrees_of(of_gpu("h100:4"), SMALL, (2, 3, 4, 8)) == [2, 4]


def test_candidates_are_in_order_of_price_and_then_of_capacity() -> None:
    machines = [of_gpu("h100"), of_instance("g6e.12xlarge"), of_instance("g5.12xlarge")]
    found = candidates(SMALL, machines, size_of(SMALL), length=4096, degrees=(1, 4))
    assert [(one.machine.name, one.tensor_parallel) for one in found] == [
        ("g5.12xlarge", 4),
        ("g5.12xlarge", 1),
        ("g6e.12xlarge", 4),
        ("g6e.12xlarge", 1),
        ("H100", 4),
        ("H100", 1),
    ]
    assert found[0].sequences == found[0].found.estimate.sequences_of(4096, found[0].found.max_num_tokens) > 0


def test_where_nothing_fits_the_largest_degree_is_the_first() -> None:
    found = candidates(BIG, [of_instance("g5.12xlarge")], size_of(BIG), length=4096)
    assert [one.tensor_parallel for one in found] == [4, 2, 1]
    assert all(one.sequences == 0 for one in found)


def test_the_cheapest_holds_as_many_as_asked() -> None:
    found = candidates(BIG, aws_machines(), size_of(BIG), length=4096)
    best = cheapest(found, BIG, 64)
    assert best is not None and best.price is not None
    assert best.sequences >= 64
    assert all(one.sequences < 64 for one in found if one.price is not None and one.price < best.price)
    assert cheapest(found, BIG, 10**9) is None


def test_types_whose_host_cannot_hold_the_checkpoint_are_left_out() -> None:
    """g5.xlarge has 16 GiB for 15 GiB of weights; a model of 18 GiB needs the next one."""
    sizes = CheckpointSizes.from_config(llama(num_hidden_layers=40))
    machines = [of_instance("g6e.xlarge"), of_instance("g6.xlarge"), of_instance("g6.2xlarge")]
    found = candidates(sizes, machines, size_of(sizes), length=100, degrees=(1,))
    assert [one.machine.name for one in best_of_each(found, sizes)] == ["g6.2xlarge", "g6e.xlarge"]
    best = cheapest(found, sizes, 0)
    assert best is None or best.machine.name != "g6.xlarge"


def test_machines_without_a_price_are_never_the_cheapest() -> None:
    found = candidates(SMALL, [of_gpu("h100"), of_instance("p5e.48xlarge")], size_of(SMALL), length=100)
    assert found[0].sequences > 0 and cheapest(found, SMALL, 1) is None


def test_the_smallest_has_the_least_memory_in_all() -> None:
    found = candidates(SMALL, [of_gpu("h100"), of_gpu("l4")], size_of(SMALL), length=1000)
    few = smallest(found, 1)
    assert few is not None and (few.machine.name, few.tensor_parallel) == ("L4", 1)
    many = smallest(found, few.sequences + 1)
    assert many is not None and (many.machine.name, many.tensor_parallel) == ("L4", 2)
    assert smallest(found, 10**9) is None


def test_exactly_as_many_sequences_as_asked_are_enough() -> None:
    found = candidates(SMALL, [of_instance("g6e.12xlarge")], size_of(SMALL), length=1000, degrees=(1,))
    one = replace(found[0], sequences=1)
    for asked in (0, 1):
        assert cheapest([one], SMALL, asked) is smallest([one], asked) is one
    assert cheapest([one], SMALL, 2) is smallest([one], 2) is None


def test_the_memory_in_all_is_that_of_all_gpus() -> None:
    found = candidates(SMALL, [of_gpu("l4"), of_gpu("a100-40gb")], size_of(SMALL), length=100, degrees=(1, 2))
    two_small, one_large = (
        next(one for one in found if (one.machine.name, one.tensor_parallel) == wanted)
        for wanted in (("L4", 2), ("A100-40GB", 1))
    )
    assert smallest([two_small, one_large], 1) is one_large
