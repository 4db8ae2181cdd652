from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.model.old_engine import OldEngine


def written(path: Path, *files: str, config: dict[str, Any] | None = None) -> Path:
    for name in files:
        (path / name).write_bytes(b"x")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("trt_llm_model_float16_tp2_rank0.engine", {"OPTION_TENSOR_PARALLEL_DEGREE": "2", "OPTION_DTYPE": "fp16"}),
        ("llama_bfloat16_tp1_rank0.engine", {"OPTION_DTYPE": "bf16"}),
        (
            "gpt_float16_tp4_pp2_rank7.engine",
            {"OPTION_TENSOR_PARALLEL_DEGREE": "4", "OPTION_PIPELINE_PARALLEL_DEGREE": "2", "OPTION_DTYPE": "fp16"},
        ),
        ("model_rank0.engine", {}),
    ],
)
def test_the_name_of_the_file_tells_degrees_and_number_format(
    tmp_path: Path, file: str, settings: dict[str, str]
) -> None:
    old = OldEngine.find(written(tmp_path, file))
    assert old is not None and old.file == file
    assert old.settings == settings


@pytest.mark.parametrize("file", ["llama_float16_tp2_rank0.engine", "rank0.engine"])
def test_the_config_tells_everything_that_was_compiled_in(tmp_path: Path, file: str) -> None:
    builder = {
        "precision": "float16", "tensor_parallel": 2, "pipeline_parallel": 1,
        "max_batch_size": 64, "max_input_len": 2048, "max_output_len": 512, "max_beam_width": 1,
    }  # fmt: skip
    old = OldEngine.find(written(tmp_path, file, config={"builder_config": builder, "plugin_config": {}}))
    assert old is not None
    assert (
        "`OPTION_TENSOR_PARALLEL_DEGREE=2 OPTION_DTYPE=fp16 OPTION_MAX_ROLLING_BATCH_SIZE=64 "
        "OPTION_MAX_INPUT_LEN=2048 OPTION_MAX_OUTPUT_LEN=512 djl-trtllm compile CHECKPOINT OUT`" in old.refusal
    )


@pytest.mark.parametrize(
    ("files", "config"),
    [
        (("rank0.engine",), {"pretrained_config": {}, "build_config": {}}),
        (("rank0.engine",), None),
        (("model.safetensors",), {"builder_config": {}}),
        ((), None),
    ],
)
def test_what_is_not_old_is_not_taken_for_it(
    tmp_path: Path, files: tuple[str, ...], config: dict[str, Any] | None
) -> None:
    assert OldEngine.find(written(tmp_path, *files, config=config)) is None
