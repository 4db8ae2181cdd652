from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.cluster.gpus import reserved_gpus
from djl_trtllm.config import load
from djl_trtllm.errors import ConfigError

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)


def gpus(**options: Any) -> int:
    return reserved_gpus(load(None, {}, arguments=[f"{name}={value}" for name, value in options.items()]).options)


def cluster(monkeypatch: pytest.MonkeyPatch, *of_nodes: int) -> None:
    """This process is connected to a cluster whose nodes have these numbers of GPUs; a dead one had more."""
    nodes = [
        {"Alive": True, "NodeManagerAddress": f"10.0.0.{n}", "NodeID": f"{n}" * 20, "Resources": {"GPU": float(count)}}
        for n, count in enumerate(of_nodes, 1)
    ]
    nodes.append({**nodes[0], "Alive": False, "Resources": {"GPU": 64.0}})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: nodes)


RANKS = {"tensor_parallel_degree": 4, "pipeline_parallel_degree": 2}


def test_gpus_are_those_of_the_ranks() -> None:
    assert gpus(backend="scripted", **RANKS) == 0
    assert gpus(backend="pytorch", **RANKS) == 8
    assert gpus(backend="auto") == 0, "there is no cluster"
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree=max .* give a number, or the argument gpus"):
        gpus(backend="pytorch", tensor_parallel_degree="max")


def test_where_the_cluster_has_gpus_any_model_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, 0, 8)
    assert gpus(backend="auto", **RANKS) == 8
    cluster(monkeypatch, 0, 0)
    assert gpus(backend="auto", **RANKS) == 0


def test_more_gpus_than_any_node_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, 0, 4, 2)
    with pytest.raises(ConfigError, match=r"reserves 8 GPUs on one node, and no node has more than 4: 0 on 10.0.0.1"):
        gpus(backend="pytorch", **RANKS)
    cluster(monkeypatch, 0, 0)
    assert gpus(backend="pytorch", **RANKS) == 8, "nodes with GPUs are to come"


@pytest.mark.parametrize("of_nodes", [(0, 8), (8, 4), (2, 2), (0, 0)])
def test_ranks_span_nodes_that_are_alike_and_have_enough_gpus(
    of_nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, 4, 4)
    assert gpus(backend="pytorch", orchestrator_type="ray", **RANKS) == 0, "TensorRT-LLM reserves them itself"
    cluster(monkeypatch, *of_nodes)
    with pytest.raises(ConfigError, match=r"the same number of GPUs on each node, .* at least 8 together"):
        gpus(backend="pytorch", orchestrator_type="ray", **RANKS)
