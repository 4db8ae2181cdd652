"""Models on a Ray cluster: `djl_trtllm.cluster:build` is an application of Ray Serve (docs/ray.md)."""

from djl_trtllm.cluster.application import build

__all__ = ["build"]
