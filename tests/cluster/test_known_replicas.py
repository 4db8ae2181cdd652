from __future__ import annotations

import gc
from typing import Any
from weakref import WeakValueDictionary

import pytest

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)

from ray import cloudpickle
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from djl_trtllm.cluster import request_router
from djl_trtllm.cluster.known_replicas import replicas_of


def a_router(kind: Any, deployment: str, *replicas: str) -> Any:
    of = DeploymentID(deployment, "app")
    router = kind(deployment_id=of, handle_source=DeploymentHandleSource.REPLICA)
    router.initialize_state(slack=1, deployment=deployment)
    router._replicas = {ReplicaID(name, of): None for name in replicas}
    return router


def test_replicas_are_those_of_the_last_router_of_their_deployment() -> None:
    assert replicas_of("a") == []
    first, b = a_router(request_router.PrefixRouter, "a", "r1"), a_router(request_router.PrefixRouter, "b")
    assert (replicas_of("a"), replicas_of("b")) == (["r1"], [])
    last = a_router(request_router.PrefixRouter, "a", "r2", "r3")
    assert replicas_of("a") == ["r2", "r3"]
    del first, last, b
    gc.collect()
    assert replicas_of("a") == []


def test_routers_of_the_copy_that_ray_makes_of_the_class_are_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cloudpickle.register_pickle_by_value(request_router)
    try:
        pickled = cloudpickle.dumps(request_router.PrefixRouter)
    finally:
        cloudpickle.unregister_pickle_by_value(request_router)
    # As in another process: in this one it has noted the class.
    monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", WeakValueDictionary())
    copied = cloudpickle.loads(pickled)
    assert copied is not request_router.PrefixRouter
    router = a_router(copied, "copied", "r1")
    assert replicas_of("copied") == ["r1"]
    del router
