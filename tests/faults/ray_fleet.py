"""A fleet of replicas on a Ray cluster, what happens to it, and what that costs clients that read streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.faults.kind import Case, Row
from tests.faults.load import Load, Watch
from tests.support.client import Answer
from tests.support.ray_cluster import RayCluster, command
from tests.support.waiting import wait_until

_REPLICAS = 2
_MODEL, _GATEWAY = ":default:djl-trtllm", ":default:gateway"
"""Of their processes: the application and the deployment."""
_WITHOUT_HEAD_SECONDS = 10.0


class _FleetLoad(Load):
    """Counts requests whose answer had begun and broke off where their client sees it, apart from all others."""

    cut = 0

    def _judge(self, answer: Answer, number: int) -> None:
        if answer.status == 200 and not answer.complete and answer.body:
            self.cut += 1
        else:
            super()._judge(answer, number)


class Fleet:
    """The cluster with the scripted model; each method is a fault, and returns when as many replicas run as should.

    With `gateways`, these are between HAProxy and the replicas.
    """

    def __init__(self, cluster: RayCluster, model: Path, streams: int, gateways: int = 0) -> None:
        self.cluster = cluster
        self._model = model
        self._gateways = gateways
        # Half of the streams run, the others wait and have no byte of their answer.
        self._options: dict[str, Any] = {"max_rolling_batch_size": max(1, streams // 2 // _REPLICAS)}
        self.deploy(_REPLICAS, gateways)

    def deploy(self, replicas: int, gateways: int) -> None:
        routing: dict[str, Any] = {"routing": "prefix", "gateways": gateways} if gateways else {}
        self.cluster.deploy(self._model, replicas=replicas, options=self._options, direct=True, **routing)
        self.cluster.wait_for_replicas(replicas + gateways)

    def _processes(self, kind: str) -> list[psutil.Process]:
        return [process for process in self.cluster.replicas() if kind in command(process)]

    def kill_engine(self) -> None:
        replica = self._processes(_MODEL)[0]
        (host,) = _engines(replica)
        host.kill()
        wait_until(lambda: host not in (engines := _engines(replica)) and len(engines) == 1, what="another engine")

    def kill_replica(self) -> None:
        self._kill(_MODEL)

    def kill_gateway(self) -> None:
        self._kill(_GATEWAY)

    def _kill(self, kind: str) -> None:
        process = self._processes(kind)[0]
        process.kill()
        self._wait_for_another(process)

    def _wait_for_another(self, lost: psutil.Process) -> None:
        wanted = _REPLICAS + self._gateways

        def replaced() -> bool:
            there = self.cluster.replicas()
            return lost not in there and len(there) == wanted

        wait_until(replaced, 180, "another process")
        self.cluster.wait_for_replicas(wanted)

    def lose_node(self) -> None:
        self.cluster.call("add_node")
        replica = self._processes(_MODEL)[0]
        self.cluster.call("lose_node", replica.pid)
        self._wait_for_another(replica)

    def update(self) -> None:
        self._options["max_rolling_batch_size"] += 1
        before = {replica.pid for replica in self.cluster.replicas()}
        self.deploy(_REPLICAS, self._gateways)
        assert before.isdisjoint(replica.pid for replica in self.cluster.replicas())

    def scale(self) -> None:
        for replicas in (1, 3, 1, _REPLICAS):
            self.deploy(replicas, self._gateways)

    def scale_gateways(self) -> None:
        for gateways in (1, 3, 1, self._gateways):
            self.deploy(_REPLICAS, gateways)

    def lose_head(self) -> None:
        self.cluster.call("kill_gcs")
        time.sleep(_WITHOUT_HEAD_SECONDS)

    def update_after_restart_of_head(self) -> None:
        self.cluster.call("start_gcs")
        self.update()


def _engines(replica: psutil.Process) -> list[psutil.Process]:
    return [child for child in replica.children() if "djl_trtllm.executor" in command(child)]


def row(fleet: Fleet, case: Case, fault: str, strike: Callable[[], None], *, cuts: bool = False) -> Row:
    """`cuts`: what ran where it strikes is lost, and nothing else."""
    seconds = 0.0

    def timed(load: Load) -> None:
        nonlocal seconds
        began = time.monotonic()
        strike()
        seconds = time.monotonic() - began
        load.wait_for_parts(4 * load.streams)

    load = _FleetLoad(fleet.cluster, case.streams)
    with Watch(load) as watch:
        before = watch.peak
        load.run(timed)
    counts = f"{load.cut} cut off after they had begun, {len(load.failed)} others"
    note = "; ".join([counts, *load.failed[:1]])[:300]
    return Row(
        f"ray: {fault}",
        case.engine,
        load.requests,
        load.cut + len(load.failed),
        seconds,
        watch.slowest,
        watch.peak,
        allowed=load.cut if cuts else 0,
        refused=load.refused,
        note=note,
        memory_before=before,
        lost_pings=0 if cuts else watch.lost,
    )
