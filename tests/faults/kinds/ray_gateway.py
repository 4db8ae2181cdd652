"""A fleet's life behind gateways: they and the replicas are killed, updated, added and removed while clients read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from tests.faults.kind import Case, Kind, Row
from tests.faults.ray_fleet import Fleet, row
from tests.support.ray_cluster import RayCluster

_GATEWAYS = 2


def _run(case: Case) -> Iterator[Row]:
    if importlib.util.find_spec("ray") is None:
        yield Row("ray gateway", case.engine, note="Ray is not installed (the extra `ray`)", skipped=True)
        return
    model, _ = case.model()
    with RayCluster(nodes=2) as cluster:
        fleet = Fleet(cluster, model, case.streams, _GATEWAYS)
        yield row(fleet, case, "gateways, replica killed", fleet.kill_replica, cuts=True)
        yield row(fleet, case, "gateways, one killed", fleet.kill_gateway, cuts=True)
        if case.short:
            return
        yield row(fleet, case, "gateways, rolling update", fleet.update)
        yield row(fleet, case, "gateways, scaled to 1, 3, 1", fleet.scale_gateways)
        yield row(fleet, case, "gateways, replicas scaled to 1, 3, 1", fleet.scale)


KIND = Kind("ray-gateway", _run, engines=("scripted",))
