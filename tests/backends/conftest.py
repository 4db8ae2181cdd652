"""A tiny checkpoint, fake compilers, and one engine compiled for real, as the tests of engines have them."""

from __future__ import annotations

from tests.engines.conftest import build_progress, checkpoint, engine, engine_cache, fake_compiler, roomy, s3, store

__all__ = ["build_progress", "checkpoint", "engine", "engine_cache", "fake_compiler", "roomy", "s3", "store"]
