"""The fields of custom resources that `serving/kubernetes` uses, with their types.

Read from the CustomResourceDefinitions of KEDA (8b4f083), the Prometheus operator (6adcebc), KubeRay (feeaf72), the
Gateway API Inference Extension (84436a9) and the Gateway API (4564255). A field that a manifest uses and that is not
here is an error: add it after a look at the definition. With `KUBERNETES_CRDS=DIR` the definitions themselves are used
too, if the folder has them (docs/kubernetes.md).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0)]


class Strict(msgspec.Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """A name that is not a field is an error."""


class Metadata(Strict):
    name: str
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Resource(Strict):
    api_version: str
    kind: str
    metadata: Metadata


class Labels(Strict):
    match_labels: Annotated[dict[str, str], Meta(min_length=1)]


class Relabeling(Strict):
    target_label: str
    replacement: str


class MetricRelabeling(Strict):
    source_labels: list[str]
    regex: str
    target_label: str


class PodMetricsEndpoint(Strict):
    port: str
    path: str
    interval: Annotated[str, Meta(pattern=r"^\d+(ms|s|m|h)$")]
    relabelings: list[Relabeling] = []
    metric_relabelings: list[MetricRelabeling] = []


class PodMonitorSpec(Strict):
    selector: Labels
    pod_metrics_endpoints: list[PodMetricsEndpoint]


class PodMonitor(Resource):
    spec: PodMonitorSpec


class ScaleTarget(Strict):
    name: str


class Trigger(Strict):
    type: Literal["prometheus"]
    name: str
    # KEDA's metadata are texts, whatever they mean. These are the prometheus scaler's.
    metadata: dict[Literal["serverAddress", "query", "threshold", "ignoreNullValues"], str]


class ScalingPolicy(Strict):
    type: Literal["Pods", "Percent"]
    value: Annotated[int, Meta(gt=0)]
    period_seconds: Annotated[int, Meta(gt=0, le=1800)]


class ScalingRules(Strict):
    stabilization_window_seconds: Annotated[int, Meta(ge=0, le=3600)]
    policies: list[ScalingPolicy]
    select_policy: Literal["Max", "Min", "Disabled"]


class Behavior(Strict):
    scale_up: ScalingRules
    scale_down: ScalingRules


class AutoscalerConfig(Strict):
    behavior: Behavior


class Advanced(Strict):
    horizontal_pod_autoscaler_config: AutoscalerConfig


class Fallback(Strict):
    failure_threshold: Count
    replicas: Count
    behavior: Literal["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]


class ScaledObjectSpec(Strict):
    scale_target_ref: ScaleTarget
    min_replica_count: Count
    max_replica_count: Count
    polling_interval: Count
    fallback: Fallback
    advanced: Advanced
    triggers: list[Trigger]


class ScaledObject(Resource):
    spec: ScaledObjectSpec


class PortNumber(Strict):
    number: Port


class PickerReference(Strict):
    name: str
    port: PortNumber
    failure_mode: Literal["FailOpen", "FailClose"]


class InferencePoolSpec(Strict):
    selector: Labels
    target_ports: Annotated[list[PortNumber], Meta(min_length=1, max_length=8)]
    endpoint_picker_ref: PickerReference


class InferencePool(Resource):
    spec: InferencePoolSpec


class ParentReference(Strict):
    name: str


class PathMatch(Strict):
    type: Literal["Exact", "PathPrefix", "RegularExpression"]
    value: str


class RouteMatch(Strict):
    path: PathMatch


class BackendReference(Strict):
    group: str
    kind: str
    name: str


class Timeouts(Strict):
    request: Annotated[str, Meta(pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")]


class RouteRule(Strict):
    matches: list[RouteMatch]
    backend_refs: list[BackendReference]
    timeouts: Timeouts


class RouteSpec(Strict):
    parent_refs: list[ParentReference]
    rules: list[RouteRule]


class HttpRoute(Resource):
    spec: RouteSpec


class RayNodes(Strict):
    # What `ray start` gets: texts.
    ray_start_params: dict[str, str]
    # A pod template: the core's schema.
    template: dict[str, Any]


class RayWorkers(RayNodes):
    group_name: str
    replicas: Count
    min_replicas: Count
    max_replicas: Count


class RayClusterSpec(Strict):
    ray_version: str
    enable_in_tree_autoscaling: bool
    head_group_spec: RayNodes
    worker_group_specs: list[RayWorkers]


class RayServiceSpec(Strict):
    ray_cluster_deletion_delay_seconds: Count
    serve_config: Annotated[str, Meta(min_length=1)] = msgspec.field(name="serveConfigV2")
    ray_cluster_config: RayClusterSpec


class RayService(Resource):
    spec: RayServiceSpec


SPECS: dict[tuple[str, str], type[Resource]] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): PodMonitor,
    ("keda.sh/v1alpha1", "ScaledObject"): ScaledObject,
    ("inference.networking.k8s.io/v1", "InferencePool"): InferencePool,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HttpRoute,
    ("ray.io/v1", "RayService"): RayService,
}
