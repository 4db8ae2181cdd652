"""The model of a DJL worker process."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from djl_trtllm.djl import worker
from djl_trtllm.djl.worker import Metrics, is_passive, load_status, open_worker_model, require_mode
from djl_trtllm.errors import ConfigError, DjlTrtllmError, ExecutorStartError, ModelError
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import Model, ModelService
from djl_trtllm.service.model import ModelSource
from tests.support.in_process import Hosts, ask, played_model
from tests.support.models import scripted_model
from tests.support.virtual_time import in_virtual_time


@pytest.mark.parametrize(("rank", "passive"), [(None, False), ("0", False), ("1", True)])
def test_of_mpis_processes_the_first_has_the_model(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, passive: bool
) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    assert is_passive() is passive


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_is_that_of_djls_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = scripted_model(tmp_path / "model")
    assert open_worker_model({"model_dir": str(path)}).directory == path
    monkeypatch.chdir(path)
    assert open_worker_model({}).directory == path


def test_the_engine_process_is_no_part_of_djls_mpi_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PRTE_X"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("COMPILE_MODE", "kept")
    open_worker_model({"model_dir": scripted_model(tmp_path / "model")})
    assert not [name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_"))]
    assert os.environ["COMPILE_MODE"] == "kept"


def test_where_djl_has_put_a_model_that_it_fetched_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = scripted_model(tmp_path / "fetched")
    sources: list[ModelSource] = []
    monkeypatch.setattr(worker, "prepare", lambda source, under_djl: sources.append(source))
    options = {"option.model_id": "acme/story", "option.max_input_len": 77}
    path = scripted_model(tmp_path / "model", None, **options)
    open_worker_model({"model_dir": str(path), "model_id": str(fetched)})
    open_worker_model({"model_dir": str(path), "model_id": "acme/elsewhere"})
    open_worker_model({"model_dir": str(path)})
    assert [source.config.options.model_id for source in sources] == [str(fetched), "acme/story", "acme/story"]
    assert [(source.name, source.directory) for source in sources] == [("scripted", path)] * 3
    assert [source.config.options.max_input_len for source in sources] == [77] * 3


def test_a_place_that_the_directory_names_itself_keeps_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = scripted_model(tmp_path / "fetched")
    sources: list[ModelSource] = []
    monkeypatch.setattr(worker, "prepare", lambda source, under_djl: sources.append(source))
    path = scripted_model(tmp_path / "model", None, **{"option.model_id": str(fetched)})
    open_worker_model({"model_dir": str(path), "model_id": str(fetched)})
    assert "serving.properties" in str(sources[0].config.origin("model_id"))


def test_what_is_wrong_is_reported_with_its_origin(tmp_path: Path) -> None:
    path = scripted_model(tmp_path / "model", None, **{"option.max_input_len": "many"})
    with pytest.raises(ConfigError, match=r"option\.max_input_len=many"):
        open_worker_model({"model_dir": str(path)})


# -- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("properties", [{"rolling_batch": "enable"}, {"rolling_batch": "auto"}])
def test_each_handler_is_for_its_mode(properties: dict[str, str]) -> None:
    require_mode(properties, rolling=True)
    with pytest.raises(ModelError, match=r"djl_trtllm\.async_handler is for DJL's async mode: set option\.async_mode"):
        require_mode(properties, rolling=False)


@pytest.mark.parametrize("properties", [{"rolling_batch": "disable"}, {"rolling_batch": ""}, {}])
def test_without_a_rolling_batch_it_is_async_mode(properties: dict[str, str]) -> None:
    require_mode(properties, rolling=False)
    with pytest.raises(ModelError, match=r"djl_trtllm\.handler is for DJL's rolling batch: set option\.rolling_batch="):
        require_mode(properties, rolling=True)


@pytest.mark.parametrize(("message", "status"), [("CUDA error: Out Of Memory", 507), ("no such engine", 500)])
def test_djl_has_a_status_for_memory_that_ran_out(message: str, status: int) -> None:
    error: DjlTrtllmError = ExecutorStartError(message)
    assert load_status(error) == status


# -- metrics -----------------------------------------------------------------------------------------------------------


_DJLS_PATTERN = re.compile(r"\[METRICS\]\s*([\w\s]+)\.([\w\s]+):([0-9\-,.e]+)(?:\|#([^|]*))?(?:\|(\d+))?(?:\|([cgh]))?")
"""Of `ai.djl.metric.Metric`."""


def values(lines: list[str]) -> dict[str, int]:
    """The figures of lines that all have the unit and the dimensions they should have, as DJL reads them."""
    found = [_DJLS_PATTERN.fullmatch(line) for line in lines]
    parts = [match.groups() for match in found if match is not None]
    assert [(unit, dimensions) for _, unit, _, dimensions, _, _ in parts] == [
        ("Count", f"Model:story,Host:{socket.gethostname()}") for _ in lines
    ]
    return {name: int(value) for name, _, value, *_ in parts}


@in_virtual_time
async def test_metrics_are_what_happened_since_the_last_ones(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    metrics = Metrics(service)
    assert metrics.lines() == []
    model: Model = played_model(tokenizer, max_rolling_batch_size=1)
    await service.load(model)
    assert metrics.lines() == []
    for tokens in (3, 2):
        await ask(service, tokens)
    hosts.last.step(2)
    assert values(metrics.lines()) == {"Requests": 2, "GeneratedTokens": 2, "Running": 1, "Waiting": 1}
    hosts.last.step()
    assert values(metrics.lines()) == {"Requests": 0, "GeneratedTokens": 1, "Running": 1, "Waiting": 0}
    assert values(metrics.lines()) == {"Requests": 0, "GeneratedTokens": 0, "Running": 1, "Waiting": 0}
    hosts.last.step(2)
    assert values(metrics.lines()) == {"Requests": 0, "GeneratedTokens": 2, "Running": 0, "Waiting": 0}
    assert metrics.lines() == []
    await service.close()


@in_virtual_time
async def test_what_only_waits_or_came_and_went_is_news(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    metrics = Metrics(service)
    await service.load(played_model(tokenizer))
    asked = await ask(service)
    service.cancel(asked.generations)
    hosts.last.step()
    assert values(metrics.lines()) == {"Requests": 1, "GeneratedTokens": 0, "Running": 0, "Waiting": 0}
    assert service.batch is not None
    service.batch.admit(1)
    assert values(metrics.lines()) == {"Requests": 0, "GeneratedTokens": 0, "Running": 0, "Waiting": 1}
    await service.close()


def test_the_log_does_not_say_that_what_djl_serving_reads_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"option.async_mode": "true", "minWorkers": 1, "option.task": "text-generation"}
    path = scripted_model(tmp_path / "model", None, **options)
    with caplog.at_level("INFO"):
        open_worker_model({"model_dir": str(path)})
    assert "option.task = text-generation" in caplog.text
    assert "option.async_mode" not in caplog.text and "minWorkers" not in caplog.text
