"""Servers on the installed vLLM; without one nothing here runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from djl_trtllm.backends.vllm.names import installed_version
from tests.support.models import link_checkpoint, write_adapter
from tests.support.random_requests import ADAPTER
from tests.support.server import Server, running

START_SECONDS = 1800
"""Importing vLLM for the first time takes minutes where two cores are shared."""

ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"), "HF_HUB_OFFLINE": "1"}
"""The environment of a server here: the KV cache has a GiB, unless the caller says how much."""

FILE = """\
engine=Python
option.rolling_batch=vllm
option.dtype=fp32
option.enforce_eager=true
option.max_model_len=2560
option.max_rolling_batch_size=32
option.enable_lora=true
option.max_loras=2
option.max_lora_rank=8
option.executor_hang_timeout=300
option.model_loading_timeout=1800
"""
"""A serving.properties as LMI's users write it, but for the memory of a test machine."""


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if installed_version() is None:
        pytest.skip("vLLM is not installed: scripts/test-vllm has it")
    directory = link_checkpoint(tmp_path_factory.mktemp("vllm") / "story")
    (directory / "serving.properties").write_text(FILE)
    write_adapter(directory / "adapters" / ADAPTER)
    return directory


@pytest.fixture(scope="package")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Server(model, ON_CPU, tmp_path_factory.mktemp("scratch")), START_SECONDS) as started:
        yield started
