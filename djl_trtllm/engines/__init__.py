"""Compiling: checkpoint in, engine directory out.

A plan is derived from configuration, model files and machine. An engine directory carries a manifest that says what the
engine was made from: an engine that does not fit is refused before it is loaded, and a compiled one is found again in
the cache. Compilers run in subprocesses; nothing here imports torch or an engine.
"""

from djl_trtllm.engines.build import build_engine
from djl_trtllm.engines.cache import EngineCache, cache_key
from djl_trtllm.engines.hardware import Gpu, Hardware, available_memory
from djl_trtllm.engines.identity import checkpoint_identity
from djl_trtllm.engines.manifest import EngineDir, Manifest
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.engines.preparation import prepare_engine

__all__ = [
    "EngineCache",
    "EngineDir",
    "EnginePlan",
    "Gpu",
    "Hardware",
    "Manifest",
    "available_memory",
    "build_engine",
    "cache_key",
    "checkpoint_identity",
    "prepare_engine",
]
