"""Public files of LMI that name vLLM, on the installed vLLM: a small model and this machine in the place of theirs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from djl_trtllm.backends.planning import plan_fitted
from djl_trtllm.config.resolve import resolve
from djl_trtllm.config.sources import read_arguments
from djl_trtllm.model import inspect
from tests.config.test_documents import DATA, in_environment, sources, written
from tests.support.client import exchange, lmi
from tests.support.models import PROMPT
from tests.support.server import Server, running
from tests.vllm.conftest import ON_CPU, START_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

REPLACED = (
    "quantize",
    "speculative_config",
    "config_format",
    "load_format",
    "tensor_parallel_degree",
    "kv_cache_dtype",  # FP8 needs AVX-512
    "max_model_len",
    "gpu_memory_utilization",
)
"""What says how the weights of a model are stored, names other models, or is for its machine."""
HERE = ["option.tensor_parallel_degree=1", "option.max_model_len=512"]
TOKENS = 4
ASKED: tuple[tuple[dict[str, Any], str], ...] = (
    (lmi(PROMPT, max_new_tokens=TOKENS, details=True, ignore_eos=True), "/invocations"),
    (
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "ignore_eos": True},
        "/v1/chat/completions",
    ),
)
"""A request of LMI's, and a chat."""
COUNT = int(os.environ.get("PUBLIC_FILES", "30"))
NOT_HERE = {"prepare.py#qwen3-8b-lmcache": "LMCache is not installed"}
FILES: list[dict[str, Any]] = [
    file for file in yaml.safe_load((DATA / "lmi.yaml").read_text()) if "by vLLM" in file["verdict"]
]


def fitting(file: dict[str, Any]) -> dict[str, str]:
    """What a file sets, but for what belongs to its own model and machine."""
    names = {name: name.lower().removeprefix("option_").removeprefix("option.") for name in file["set"]}
    return {name: value for name, value in file["set"].items() if names[name] not in REPLACED}


def name_of(file: dict[str, Any]) -> str:
    """The last part of a file's place, as `Fine_Tuning.ipynb`."""
    return str(file["where"]).split("/")[-1]


def served() -> list[dict[str, Any]]:
    """The files to start: of those that set the same, one, and those with most settings first."""
    distinct = {tuple(sorted(fitting(file).items())): file for file in FILES if name_of(file) not in NOT_HERE}
    return sorted(distinct.values(), key=lambda file: -len(file["set"]))[:COUNT]


def test_vllm_takes_the_arguments_that_each_file_becomes(model: Path) -> None:
    from vllm import EngineArgs

    assert len(FILES) >= 75
    for file in FILES:
        text, _ = written("lmi", fitting(file))
        _, found = sources("lmi", file["where"], text, fitting(file))
        _, plan = plan_fitted(resolve([*found, read_arguments(HERE)]), inspect(model))
        arguments = plan.executor_options()["arguments"]
        assert EngineArgs(**arguments).create_engine_config().scheduler_config.max_num_seqs == plan.max_sequences


@pytest.mark.parametrize("file", served(), ids=name_of)
def test_a_file_is_served(model: Path, tmp_path: Path, file: dict[str, Any]) -> None:
    settings = fitting(file)
    environ = dict(ON_CPU)
    lines = []
    if in_environment(settings):
        environ |= settings
    else:
        lines = written("lmi", settings)[0].splitlines()
    lines += [*HERE, "option.enforce_eager=true", f"option.model_loading_timeout={START_SECONDS}"]
    directory = tmp_path / "model"
    directory.mkdir()
    for path in model.iterdir():
        if path.is_symlink():
            (directory / path.name).symlink_to(path.resolve())
    (directory / "serving.properties").write_text("\n".join(lines))
    with running(Server(directory, environ, tmp_path / "scratch"), START_SECONDS) as server:
        begun = server.metric("generated_tokens_total")
        for body, url in ASKED:
            answer = asyncio.run(exchange(server.port, body, path=url))
            assert answer.status == 200 and answer.complete, answer.body
        assert server.metric("generated_tokens_total") == begun + TOKENS * len(ASKED)
        assert server.says("backend vllm")
