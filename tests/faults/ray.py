"""A fleet's life: replicas on a Ray cluster are updated, added, removed and killed while clients read streams."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from packaging.version import Version

from tests.faults.load import Case, Load, Row, Watch
from tests.support.client import Answer
from tests.support.processes import wait_until
from tests.support.ray_cluster import RayCluster, command

_FIRST_WITH_ROCKSDB = Version("2.60")
"""The first version with RocksDB: a head that is started again finds its state on the disk."""


def ray_faults(case: Case) -> Iterator[Row]:
    if importlib.util.find_spec("ray") is None:
        yield Row("ray", case.engine, note="Ray is not installed (the extra `ray`)", skipped=True)
        return
    model, _ = case.model()
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(case.folder / "gcs")}
    if Version(importlib.metadata.version("ray")) < _FIRST_WITH_ROCKSDB:
        storage = {}
    with RayCluster(nodes=2, environ=storage) as cluster:
        fleet = Fleet(cluster, model, case.streams)
        yield row(fleet, case, "engine process killed", fleet.kill_engine)
        yield row(fleet, case, "replica killed", fleet.kill_replica, cuts=True)
        if not (case.short and storage):
            yield row(fleet, case, "rolling update", fleet.update)
        if not case.short:
            yield row(fleet, case, "scaled to 1, 3, 1", fleet.scale)
            yield row(fleet, case, "node lost", fleet.lose_node, cuts=True)
        yield row(fleet, case, "head lost", fleet.lose_head)
        if storage:
            fault = "head started again, then a rolling update"
            yield row(fleet, case, fault, fleet.update_after_restart_of_head)


# -- A fleet of replicas on a Ray cluster, what happens to it, and what that costs clients that read streams -----------

_REPLICAS = 2
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
    """The cluster with the scripted model; each method is a fault, and returns when as many replicas run as should."""

    def __init__(self, cluster: RayCluster, model: Path, streams: int) -> None:
        self.cluster = cluster
        self._model = model
        # Half of the streams run, the others wait and have no byte of their answer.
        self._options: dict[str, Any] = {"max_rolling_batch_size": max(1, streams // 2 // _REPLICAS)}
        self.deploy(_REPLICAS)

    def deploy(self, replicas: int) -> None:
        self.cluster.deploy(self._model, replicas=replicas, options=self._options, direct=True)
        self.cluster.wait_for_replicas(replicas)

    def kill_engine(self) -> None:
        replica = self.cluster.replicas()[0]
        (engine,) = _engines(replica)
        engine.kill()
        wait_until(lambda: engine not in (found := _engines(replica)) and len(found) == 1, what="another engine")

    def kill_replica(self) -> None:
        replica = self.cluster.replicas()[0]
        replica.kill()
        self._wait_for_another(replica)

    def _wait_for_another(self, lost: psutil.Process) -> None:
        def replaced() -> bool:
            there = self.cluster.replicas()
            return lost not in there and len(there) == _REPLICAS

        wait_until(replaced, 180, "another process")
        self.cluster.wait_for_replicas(_REPLICAS)

    def lose_node(self) -> None:
        self.cluster.call("add_node")
        replica = self.cluster.replicas()[0]
        self.cluster.call("lose_node", replica.pid)
        self._wait_for_another(replica)

    def update(self) -> None:
        self._options["max_rolling_batch_size"] += 1
        before = {replica.pid for replica in self.cluster.replicas()}
        self.deploy(_REPLICAS)
        assert before.isdisjoint(replica.pid for replica in self.cluster.replicas())

    def scale(self) -> None:
        for replicas in (1, 3, 1, _REPLICAS):
            self.deploy(replicas)

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
    note = "; ".join([counts, *dict.fromkeys(load.failed)])[:300]
    return Row(
        f"ray: {fault}",
        case.engine,
        load.requests,
        load.cut + len(load.failed),
        seconds,
        **watch.figures(),
        allowed=load.cut * cuts,
        refused=load.refused,
        note=note,
        memory_before=before,
        lost_pings=0 if cuts else watch.lost,
    )
