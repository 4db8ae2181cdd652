"""A fleet's life: replicas on a Ray cluster are updated, added, removed and killed while clients read streams."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from tests.faults.kind import Case, Kind, Row
from tests.faults.ray_fleet import Fleet, row
from tests.support.ray_cluster import RayCluster


def _run(case: Case) -> Iterator[Row]:
    if importlib.util.find_spec("ray") is None:
        yield Row("ray", case.engine, note="Ray is not installed (the extra `ray`)", skipped=True)
        return
    model, _ = case.model()
    with RayCluster(nodes=2) as cluster:
        fleet = Fleet(cluster, model, case.streams)
        yield row(fleet, case, "engine process killed", fleet.kill_engine)
        yield row(fleet, case, "replica killed", fleet.kill_replica, cuts=True)
        yield row(fleet, case, "rolling update", fleet.update)
        if case.short:
            return
        yield row(fleet, case, "scaled to 1, 3, 1", fleet.scale)
        yield row(fleet, case, "node lost", fleet.lose_node, cuts=True)
        yield row(fleet, case, "head lost", fleet.lose_head)


KIND = Kind("ray", _run, engines=("scripted",))
