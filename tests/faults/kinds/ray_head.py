"""The head of a Ray cluster is lost and started again. Its state is on a disk, as KubeRay's may be in a Redis."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from packaging.version import Version

from tests.faults.kind import Case, Kind, Row
from tests.faults.ray_fleet import Fleet, row
from tests.support.ray_cluster import RayCluster

_FIRST_WITH_ROCKSDB = Version("2.60")


def _run(case: Case) -> Iterator[Row]:
    try:
        suits = Version(importlib.metadata.version("ray")) >= _FIRST_WITH_ROCKSDB
    except importlib.metadata.PackageNotFoundError:
        suits = False
    if not suits:
        yield Row("ray head", case.engine, note="this machine has no Ray that keeps its state on a disk", skipped=True)
        return
    model, _ = case.model()
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(case.folder / "gcs")}
    with RayCluster(nodes=2, environ=storage) as cluster:
        fleet = Fleet(cluster, model, case.streams)
        yield row(fleet, case, "head lost", fleet.lose_head)
        yield row(fleet, case, "head started again, then a rolling update", fleet.update_after_restart_of_head)


KIND = Kind("ray-head", _run, engines=("scripted",))
