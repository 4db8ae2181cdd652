from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.backends.tensorrt_llm.plans import building, changed, planned, problems, running


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"quantize": "int8"}, {"QuantConfig.quant_algo": "QuantAlgo.W8A16"}),
        ({"quantize": "int4"}, {"QuantConfig.quant_algo": "QuantAlgo.W4A16"}),
        (
            {"quantize": "awq"},
            {"QuantConfig.quant_algo": "QuantAlgo.W4A16_AWQ", "CalibConfig.calib_batches": 32},
        ),
        (
            {"quantize": "awq", "awq_format": "w4a8_awq", "awq_block_size": 64, "awq_calib_size": 10},
            {
                "QuantConfig.quant_algo": "QuantAlgo.W4A8_AWQ",
                "QuantConfig.group_size": 64,
                "CalibConfig.calib_batches": 10,
            },
        ),
        ({"quantize": "w4a8"}, {"QuantConfig.quant_algo": "QuantAlgo.W4A8_AWQ", "CalibConfig.calib_batches": 32}),
        (
            {"quantize": "smoothquant"},
            {
                "QuantConfig.quant_algo": "QuantAlgo.W8A8_SQ_PER_CHANNEL",
                "QuantConfig.smoothquant_val": 0.8,
                "CalibConfig.calib_batches": 32,
            },
        ),
        (
            {"quantize": "smoothquant", "smoothquant_alpha": 0.6, "calib_size": 50, "calib_batch_size": 8},
            {
                "QuantConfig.quant_algo": "QuantAlgo.W8A8_SQ_PER_CHANNEL",
                "QuantConfig.smoothquant_val": 0.6,
                "CalibConfig.calib_batches": 7,
                "CalibConfig.calib_batch_size": 8,
            },
        ),
        (
            {"quantize": "fp8", "kv_cache_dtype": "fp8"},
            {
                "QuantConfig.quant_algo": "QuantAlgo.FP8",
                "QuantConfig.kv_cache_quant_algo": "QuantAlgo.FP8",
                "CalibConfig.calib_batches": 32,
            },
        ),
        ({"kv_cache_dtype": "int8"}, {"QuantConfig.kv_cache_quant_algo": "QuantAlgo.INT8"}),
        (
            {"quantize": "awq", "quant_algo": "FP8", "calib_batches": 4},
            {"QuantConfig.quant_algo": "QuantAlgo.FP8", "CalibConfig.calib_batches": 4},
        ),
        ({"quantize": "none"}, {}),
    ],
)
def test_a_quantisation_is_an_algorithm_with_its_calibration(
    roomy: Path, options: dict[str, object], expected: dict[str, Any]
) -> None:
    assert changed(building(roomy), building(roomy, **options)) == expected


@pytest.mark.parametrize(
    ("quantize", "offline"), [("none", True), ("int8", True), ("int4", True), ("awq", False), ("fp8", False)]
)
def test_samples_for_a_calibration_come_from_the_hub(roomy: Path, quantize: str, offline: bool) -> None:
    assert planned(roomy, quantize=quantize).offline is offline
    assert planned(roomy, quantize=quantize, calib_dataset=roomy).offline is True


def quantised(roomy: Path, to: Path, **config: object) -> Path:
    shutil.copytree(roomy, to)
    (to / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    return to


def test_a_checkpoint_that_is_quantised_so_already_is_taken_as_it_is(roomy: Path, tmp_path: Path) -> None:
    path = quantised(roomy, tmp_path / "m", quant_algo="FP8", kv_cache_quant_algo="FP8")
    assert building(path, quantize="fp8") == building(path) == building(roomy)
    assert planned(path, quantize="fp8").offline
    assert running(path, backend="pytorch", quantize="fp8") == running(path, backend="pytorch")
    assert planned(path).describe().endswith("weights in FP8")


def test_a_checkpoint_that_is_quantised_otherwise_is_refused(roomy: Path, tmp_path: Path) -> None:
    path = quantised(roomy, tmp_path / "m", quant_algo="NVFP4")
    for backend in ("tensorrt", "pytorch"):
        (problem,) = problems(path, backend=backend, quantize="fp8")
        assert problem == (
            "option.quantize=fp8 (environment variable OPTION_QUANTIZE): the checkpoint is quantised already, with "
            "NVFP4; leave the option out, or take a checkpoint that is not"
        )


def test_pytorch_does_not_quantise(roomy: Path) -> None:
    (problem,) = problems(roomy, backend="pytorch", quantize="fp8")
    assert problem == (
        "option.quantize=fp8 (environment variable OPTION_QUANTIZE): TensorRT-LLM's pytorch backend does not quantise, "
        "and this checkpoint is not quantised: take one that is (quantised by ModelOpt, with hf_quant_config.json), or "
        "compile an engine with option.backend=tensorrt on TensorRT-LLM 1.2"
    )


@pytest.mark.parametrize(
    ("backend", "dtype", "message"),
    [
        ("tensorrt", "fp32", "TensorRT-LLM keeps the cache in the model's own 16 bits, or in 8 (fp8)"),
        ("pytorch", "fp32", "TensorRT-LLM keeps the cache in the model's own 16 bits, or in 8 (fp8)"),
        ("pytorch", "int8", "TensorRT-LLM's pytorch backend has no such cache; option.kv_cache_dtype=fp8 takes"),
    ],
)
def test_a_number_format_the_cache_cannot_have_is_refused(roomy: Path, backend: str, dtype: str, message: str) -> None:
    (problem,) = problems(roomy, backend=backend, kv_cache_dtype=dtype)
    assert problem.startswith(f"option.kv_cache_dtype={dtype} (environment variable OPTION_KV_CACHE_DTYPE): {message}")


def test_a_cache_in_the_models_own_format_needs_nothing(roomy: Path) -> None:
    assert planned(roomy, kv_cache_dtype="fp16").notes == ()
    (note,) = planned(roomy, kv_cache_dtype="fp16", dtype="bf16").notes
    assert note.endswith("TensorRT-LLM keeps the cache in the model's own number format, bfloat16")


def test_the_kind_of_smoothquant_is_chosen_by_its_two_options(roomy: Path) -> None:
    chosen = {
        (per_token, per_channel): building(
            roomy,
            quantize="smoothquant",
            smoothquant_per_token=per_token,
            smoothquant_per_channel=per_channel,
        )["QuantConfig.quant_algo"]
        for per_token in ("false", "true")
        for per_channel in ("false", "true")
    }
    assert chosen == {
        ("false", "false"): "QuantAlgo.W8A8_SQ_PER_TENSOR_PLUGIN",
        ("true", "false"): "QuantAlgo.W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
        ("false", "true"): "QuantAlgo.W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
        ("true", "true"): "QuantAlgo.W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
    }
    assert "QuantConfig.quant_algo" not in building(roomy, smoothquant_per_token="true")
