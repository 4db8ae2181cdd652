"""Compiling: checkpoint in, engine directory out.

A plan says what configuration, model files and machine come to. An engine directory carries a manifest that says what
it was made from, so that an engine that does not fit is refused before anything is loaded, and one that was made once
is found again in the cache. Compilers run in processes of their own; nothing here imports torch or an engine.
"""

from djl_trtllm.engine.backend import choose_backend, likely_backend
from djl_trtllm.engine.build import build_engine
from djl_trtllm.engine.cache import EngineCache, cache_key
from djl_trtllm.engine.compilation import compile_checkpoint
from djl_trtllm.engine.directory import EngineDir, check_engine
from djl_trtllm.engine.hardware import Gpu, Hardware, available_memory
from djl_trtllm.engine.identity import checkpoint_identity
from djl_trtllm.engine.kv_cache import KvCachePlan, blocks_of_sequence
from djl_trtllm.engine.manifest import Manifest
from djl_trtllm.engine.plan import EnginePlan
from djl_trtllm.engine.planning import plan_engine
from djl_trtllm.engine.preparation import prepare

__all__ = [
    "EngineCache",
    "EngineDir",
    "EnginePlan",
    "Gpu",
    "Hardware",
    "KvCachePlan",
    "Manifest",
    "available_memory",
    "blocks_of_sequence",
    "build_engine",
    "cache_key",
    "check_engine",
    "checkpoint_identity",
    "choose_backend",
    "compile_checkpoint",
    "likely_backend",
    "plan_engine",
    "prepare",
]
