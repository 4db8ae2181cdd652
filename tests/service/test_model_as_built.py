"""Compiled engines in every place where they are served from, with the limits that they were compiled for."""

from __future__ import annotations

import json
import logging
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from djl_trtllm.config import Config
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import EngineMismatchError
from djl_trtllm.service import model, open_source, plan, prepare
from tests.engines.helpers import gpu_machine, write_checkpoint, write_engine_files, write_tensorrt_engine

PBTXT = """
backend: "tensorrtllm"
parameters { key: "max_beam_width" value: { string_value: "${max_beam_width}" } }
parameters { key: "gpt_model_type" value: { string_value: "inflight_fused_batching" } }
"""
TRUSS = "model_metadata:\n  tensor_parallelism: 1\n"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djl_trtllm.backends.planning.this_machine", gpu_machine)


def tensorrt(path: Path) -> Path:
    """An engine of 256 sequences of 3072 tokens."""
    write_tensorrt_engine(path, max_batch_size=256, max_input_len=2048, max_seq_len=3072, max_num_tokens=8192)
    return path


def openvino(path: Path) -> Path:
    """An engine of 8 sequences of 512 tokens."""
    write_checkpoint(path)
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (path / "config.json").write_text(json.dumps(config))
    write_engine_files(path)
    limits = {"max_rolling_batch_size": 8, "max_input_len": 511, "max_output_len": 511, "max_seq_len": 512}
    head = {"format": 1, "backend": "openvino", "checkpoint": "", "versions": {}, "platform": "", "created": ""}
    (path / "manifest.json").write_text(json.dumps({**head, "options": {}, "files": {}, "limits": limits}))
    return path


def bare(root: Path, engine: Callable[[Path], Path]) -> Path:
    return engine(root / "model")


def archive(root: Path, engine: Callable[[Path], Path]) -> Path:
    with tarfile.open(root / "model.tar.gz", "w:gz") as packed:
        packed.add(engine(root / "packed"), ".")
    return root / "model.tar.gz"


def lmi(root: Path, engine: Callable[[Path], Path]) -> Path:
    (root / "tensorrt_llm").mkdir(parents=True)
    (root / "tensorrt_llm" / "config.pbtxt").write_text(PBTXT)
    engine(root / "tensorrt_llm" / "1")
    return root


def triton(root: Path, engine: Callable[[Path], Path]) -> Path:
    lmi(root, engine)
    for name in ("ensemble", "preprocessing", "postprocessing"):
        (root / name).mkdir()
        (root / name / "config.pbtxt").write_text(f'name: "{name}"\n')
    return root


def truss(root: Path, engine: Callable[[Path], Path]) -> Path:
    (root / "config.yaml").write_text(TRUSS)
    engine(root / "data" / "engine")
    (root / "serving.properties").write_text("option.model_id=data/engine\n")
    return root


def truss_with_repository(root: Path, engine: Callable[[Path], Path]) -> Path:
    triton(root / "packages" / "inflight_batcher_llm", engine)
    (root / "config.yaml").write_text(TRUSS)
    return root


PLACES = [bare, archive, lmi, triton, truss, truss_with_repository]


def served(path: Path, root: Path, **environ: str) -> tuple[Config, EnginePlan]:
    config, _, engine_plan = plan(open_source(path, {"OPTION_ENGINE_CACHE_DIR": str(root / "cache"), **environ}))
    return config, engine_plan


@pytest.mark.parametrize("place", PLACES)
def test_a_tensorrt_engine_is_served_as_it_was_built(
    tmp_path: Path, place: Callable[[Path, Callable[[Path], Path]], Path]
) -> None:
    config, engine_plan = served(place(tmp_path, tensorrt), tmp_path)
    assert (engine_plan.max_sequences, engine_plan.max_seq_len, engine_plan.max_input_len) == (256, 3072, 3071)
    assert config.options.max_num_tokens == 8192 and config.options.max_beam_width == 2
    assert str(config.origin("max_rolling_batch_size")).startswith("derived from build_config in ")
    assert engine_plan.notes == ()
    assert [warning for warning in config.warnings if "not filled in" not in warning] == []


@pytest.mark.parametrize("place", PLACES)
def test_an_openvino_engine_is_served_as_it_was_built(
    tmp_path: Path, place: Callable[[Path, Callable[[Path], Path]], Path]
) -> None:
    config, engine_plan = served(place(tmp_path, openvino), tmp_path)
    assert (engine_plan.max_sequences, engine_plan.max_seq_len, engine_plan.max_input_len) == (8, 512, 511)
    assert str(config.origin("max_seq_len")).startswith("derived from limits in ")


@pytest.mark.parametrize("engine", [tensorrt, openvino])
def test_what_is_written_in_config_pbtxt_comes_before_the_engine(
    tmp_path: Path, engine: Callable[[Path], Path]
) -> None:
    path = triton(tmp_path, engine)
    with (path / "tensorrt_llm" / "config.pbtxt").open("a") as file:
        file.write("max_batch_size: 4\n")
    config, engine_plan = served(path, tmp_path)
    assert engine_plan.max_sequences == 4
    assert str(config.origin("max_rolling_batch_size")) == f"{path}/tensorrt_llm/config.pbtxt:5"


def test_a_limit_above_the_engines_is_lowered_as_tensorrt_llm_does(tmp_path: Path) -> None:
    config, engine_plan = served(
        tensorrt(tmp_path / "model"), tmp_path, OPTION_MAX_SEQ_LEN="4096", OPTION_MAX_BATCH_SIZE="300"
    )
    assert (engine_plan.max_sequences, engine_plan.max_seq_len) == (256, 3072)
    assert [warning.split(":")[0] for warning in config.warnings] == [
        "option.max_num_sequences=300 (environment variable OPTION_MAX_BATCH_SIZE)",
        "option.max_seq_len=4096 (environment variable OPTION_MAX_SEQ_LEN)",
    ]


def test_a_beam_width_above_the_engines_is_an_error_as_in_tensorrt_llm(tmp_path: Path) -> None:
    with pytest.raises(EngineMismatchError, match=r"option\.max_beam_width=4 .*: the engine's max_beam_width is 2"):
        served(tensorrt(tmp_path / "model"), tmp_path, OPTION_MAX_BEAM_WIDTH="4")


def test_an_engine_may_be_longer_than_the_models_context(tmp_path: Path) -> None:
    _, engine_plan = served(tensorrt(tmp_path / "model"), tmp_path)
    assert engine_plan.max_seq_len > 256


def test_a_checkpoint_with_an_engine_beside_it_has_the_options_of_a_checkpoint(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    tensorrt(path / "engine")
    config, engine_plan = served(path, tmp_path)
    assert (config.options.max_rolling_batch_size, config.options.max_seq_len) == (32, None)
    assert engine_plan.max_sequences == 32


def test_the_log_says_where_each_limit_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tensorrt(tmp_path / "model")
    for file in write_checkpoint(tmp_path / "checkpoint").glob("tokenizer*"):
        file.rename(path / file.name)
    caplog.set_level(logging.INFO, model.__name__)
    prepare(open_source(path, {"OPTION_MAX_OUTPUT_LEN": "100"}))
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("limits: ")]
    assert line == (
        f"limits: option.max_rolling_batch_size=256, option.max_input_len=3071, option.max_seq_len=3072, "
        f"option.max_num_tokens=8192, option.max_beam_width=2 (derived from build_config in {path}/config.json); "
        "option.max_output_len=100 (environment variable OPTION_MAX_OUTPUT_LEN)"
    )


def test_the_log_says_what_a_smaller_engine_beside_the_checkpoint_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint(tmp_path / "model")
    engine = write_tensorrt_engine(
        path / "engine", max_batch_size=8, max_input_len=512, max_seq_len=512, max_num_tokens=4096
    )
    caplog.set_level(logging.INFO, model.__name__)
    prepared = prepare(open_source(path, {"OPTION_MAX_INPUT_LEN": "150", "OPTION_MAX_OUTPUT_LEN": "100"}))
    assert (prepared.limits.max_batch_size, prepared.limits.max_seq_len) == (8, 250)
    assert (
        f"limits of the engine {engine}: 8 sequences of 250 tokens, prompts of at most 150; planned were 32 sequences "
        "of 250 tokens, prompts of at most 150"
    ) in caplog.messages
