from __future__ import annotations

from djl_trtllm.cluster.ingress import DIRECT, problem_of_ingress


def test_nothing_is_lost_where_clients_reach_the_replica_directly() -> None:
    assert problem_of_ingress(DIRECT) is None


def test_what_is_missing_is_named() -> None:
    for name, value in DIRECT.items():
        problem = problem_of_ingress({other: DIRECT[other] for other in DIRECT if other != name})
        assert problem is not None and problem.endswith(f"Set {name}={value} on all nodes")
