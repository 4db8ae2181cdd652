"""Compiling: checkpoint in, engine directory out.

A plan is derived from configuration, model files and machine. An engine directory carries a manifest that says what the
engine was made from: an engine that does not fit is refused before it is loaded, and a compiled one is found again in
the cache. Compilers run in subprocesses; nothing here imports torch or an engine.
"""

from djl_trtllm.engines.build import build_engine
from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.hardware import Hardware
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
    "build_engine",
    "prepare_engine",
]
