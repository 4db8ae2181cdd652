"""A tiny checkpoint, fake compilers, and one engine compiled for real."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines.build import prepare_engine
from djl_trtllm.model import inspect
from tests.engines.helpers import configured, write_checkpoint
from tests.support.s3 import s3, store

__all__ = ["s3", "store"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint; tests that change it copy it first."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


@pytest.fixture(scope="session")
def roomy(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a context of 8192 tokens."""
    path = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("long") / "model"))
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that `engine` was compiled into."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def build_progress() -> list[str]:
    """The lines that compiling `engine` printed."""
    return []


@pytest.fixture(scope="session")
def engine(checkpoint: Path, engine_cache: Path, build_progress: list[str]) -> Path:
    """The tiny checkpoint compiled for real, once per run, as serving a checkpoint does it."""
    config = configured(engine_cache_dir=engine_cache)
    layout = inspect(checkpoint)
    return prepare_engine(config, layout, build_progress.append, plan=plan_engine(config, layout))


@pytest.fixture
def fake_compiler() -> Callable[..., list[str]]:
    """Commands of compilers that do one thing: `fake_compiler("fail")`."""
    script = Path(__file__).with_name("other_process.py")
    return lambda *behaviour: [sys.executable, str(script), "compile", *behaviour]
