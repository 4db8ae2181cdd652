"""The GPUs of a replica: how many it reserves, and whether the nodes of the cluster have them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from djl_trtllm.config import Backend, Options
from djl_trtllm.config.options.choices import Orchestrator
from djl_trtllm.errors import ConfigError

_WITHOUT_GPU = (Backend.OPENVINO, Backend.SCRIPTED)
KEEPS_VISIBLE_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""The environment of a replica that reserves no GPU, and whose engine has its ranks on other nodes: Ray would hide the
GPUs from it, and TensorRT-LLM gives its environment to all ranks."""


def reserved_gpus(options: Options) -> int:
    """GPUs that a replica reserves on its node. With orchestrator_type=ray, TensorRT-LLM reserves those of its ranks.

    Raises ConfigError where the nodes of the cluster that this process is connected to cannot have them.
    """
    if options.backend in _WITHOUT_GPU:
        return 0
    of_nodes = _gpus_of_nodes()
    if options.backend is Backend.AUTO and not any(of_nodes.values()):
        return 0
    degrees = (options.tensor_parallel_degree, options.pipeline_parallel_degree, options.context_parallel_size)
    if "max" in degrees:
        raise ConfigError(
            [
                "option.tensor_parallel_degree=max does not say how many GPUs a replica reserves: give a number, or "
                "the argument gpus"
            ]
        )
    ranks = math.prod(int(degree) for degree in degrees)
    ranks_are_actors = options.orchestrator_type is Orchestrator.RAY
    if of_nodes and (problem := _problem_of_nodes(ranks, of_nodes, spanning=ranks_are_actors)):
        raise ConfigError([problem])
    return 0 if ranks_are_actors else ranks


def _gpus_of_nodes() -> dict[str, int]:
    """By the addresses of the nodes that are alive; empty without a cluster."""
    import ray

    if not ray.is_initialized():
        return {}
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {
        node["NodeManagerAddress"] + ":" + node["NodeID"][:6]: int(node["Resources"].get("GPU", 0)) for node in alive
    }


def _problem_of_nodes(ranks: int, of_nodes: Mapping[str, int], *, spanning: bool) -> str | None:
    """Why this number of ranks does not fit; None if it does, or if nodes are to come.

    `spanning`: TensorRT-LLM 1.2 makes a placement group of bundles with as many GPUs as the first node has that Ray
    lists, the first of them on the node of the replica. So every node has to be like it.
    """
    most = max(of_nodes.values())
    shown = ", ".join(f"{count} on {node}" for node, count in of_nodes.items())
    if spanning and (min(of_nodes.values()) < most or not most or sum(of_nodes.values()) < ranks):
        return (
            f"option.orchestrator_type=ray with {ranks} ranks: TensorRT-LLM expects the same number of GPUs on each "
            f"node, the head included, and at least {ranks} together. The cluster has {shown}"
        )
    if not spanning and 0 < most < ranks:
        return (
            f"a replica reserves {ranks} GPUs on one node, and no node has more than {most}: {shown}. Lower the "
            "parallel degrees, or let the ranks span nodes with option.orchestrator_type=ray (docs/ray.md). If larger "
            f"nodes are to come, give the argument gpus: {ranks}"
        )
    return None
