"""Quantised Hugging Face checkpoints: what TensorRT-LLM does not load is said when planning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import EngineError
from tests.backends.tensorrt_llm.plans import planned

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLM_COMPRESSOR = {"num_bits": 8, "type": "float"}


def compressed(strategy: str, inputs: dict[str, Any], **weights: Any) -> dict[str, Any]:
    group = {"weights": {**LLM_COMPRESSOR, "strategy": strategy, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


CHANNELS = compressed("channel", {"strategy": "token"})
BLOCKS = compressed("block", {"strategy": "group", "group_size": 128})
NVFP4 = compressed("tensor_group", {"strategy": "tensor_group"}, num_bits=4)


@pytest.fixture
def quantised(roomy: Path, tmp_path: Path) -> Any:
    """`quantised(quantization_config)`: a checkpoint that says so."""

    def make(stored: dict[str, Any] | None, **config: Any) -> Path:
        path = Path(shutil.copytree(roomy, tmp_path / "m", dirs_exist_ok=True))
        given = json.loads((path / "config.json").read_text()) | {"quantization_config": stored} | config
        (path / "config.json").write_text(json.dumps(given))
        return path

    return make


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
@pytest.mark.parametrize("version", ["1.0.0", "1.2.1"])
@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "nvfp4"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "compressed-tensors"},
        compressed("tensor", {"strategy": "tensor"}),
        compressed("channel", {"strategy": "tensor"}),
        compressed("block", {"strategy": "group", "group_size": 64}),
        compressed("group", {"strategy": "token"}, num_bits=4, type="int"),
        compressed("channel", {"strategy": "token"}, type="int"),
        NVFP4,
    ],
)
def test_what_tensorrt_llm_does_not_load_is_refused(
    quantised: Any, stored: dict[str, Any], version: str, backend: str
) -> None:
    with pytest.raises(EngineError, match=f"which TensorRT-LLM {version} does not load with option.backend={backend}"):
        planned(quantised(stored), version, 1, backend=backend)


@pytest.mark.parametrize("backend", ["pytorch", "autodeploy"])
def test_awq_and_gptq_are_refused_by_every_version(quantised: Any, backend: str) -> None:
    with pytest.raises(EngineError, match=r"quant_method=gptq, bits=4, which TensorRT-LLM 1\.3\.0 does not load"):
        planned(quantised({"quant_method": "gptq", "bits": 4}), "1.3.0", 1, backend=backend)


def test_the_error_says_what_to_serve_instead(quantised: Any) -> None:
    path = quantised({"quant_method": "awq", "bits": 4})
    with pytest.raises(EngineError) as caught:
        planned(path, "1.2.1", 1)
    assert str(caught.value) == (
        f"{path}/config.json: the weights are quantised with quantization_config quant_method=awq, bits=4, which "
        "TensorRT-LLM 1.2.1 does not load with option.backend=tensorrt; it loads checkpoints that ModelOpt quantised "
        "(with hf_quant_config.json), and of the others fp8 with weight_block_size [128, 128]. Serve a checkpoint of "
        "this model that ModelOpt quantised, or the one before quantisation with option.quantize=awq"
    )
    with pytest.raises(EngineError) as caught:
        planned(path, "1.2.1", 1, backend="pytorch")
    assert str(caught.value).endswith(
        "fp8 with weight_block_size [128, 128] and mxfp4. Serve a checkpoint of this model that ModelOpt quantised, or "
        "the one before quantisation"
    )


def test_mxfp4_is_for_the_pytorch_backend(quantised: Any) -> None:
    path = quantised({"quant_method": "mxfp4"})
    with pytest.raises(EngineError, match=r"Set option\.backend=pytorch, which loads it; or serve the checkpoint befo"):
        planned(path, "1.2.1", 1)
    assert planned(path, "1.2.1", 1, backend="pytorch").notes == ()


def test_a_later_version_is_advised_where_one_takes_it(quantised: Any) -> None:
    with pytest.raises(EngineError, match=r"; or use TensorRT-LLM 1\.4\.0rc0 or later$"):
        planned(quantised({"quant_method": "nvfp4"}), "1.2.1", 1, backend="pytorch")


@pytest.mark.parametrize(
    ("stored", "version"),
    [
        (FP8, "1.0.0"),
        (FP8, "1.2.1"),
        ({"quant_method": None}, "1.2.1"),
        (None, "1.2.1"),
        ({"quant_method": "fp8"}, "1.3.0"),
        (CHANNELS, "1.3.0"),
        (BLOCKS, "1.3.0"),
        (NVFP4, "1.4.0"),
        ({"quant_method": "mxfp8"}, "1.4.0"),
    ],
)
def test_what_it_loads_is_planned_without_a_word(quantised: Any, stored: dict[str, Any] | None, version: str) -> None:
    assert planned(quantised(stored), version, 1, backend="pytorch").notes == ()


@pytest.mark.parametrize(
    ("stored", "version", "since"),
    [
        ({"quant_method": "fp8"}, "1.2.1", "1.3.0rc0"),
        (CHANNELS, "1.2.1", "1.3.0rc0"),
        (BLOCKS, "1.2.1", "1.3.0rc0"),
        ({"quant_method": "nvfp4"}, "1.3.0", "1.4.0rc0"),
        (NVFP4, "1.3.0", "1.4.0rc0"),
    ],
)
def test_versions_that_may_or_may_not_are_reported(
    quantised: Any, stored: dict[str, Any], version: str, since: str
) -> None:
    (note,) = planned(quantised(stored), version, 1, backend="pytorch").notes
    assert f'TensorRT-LLM loads it from {since} on; {version} may end with "Unsupported quantization_config"' in note


def test_modelopts_file_counts_before_the_config(quantised: Any) -> None:
    path = quantised({"quant_method": "awq"})
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ"}}))
    assert planned(path, "1.2.1", 1).notes == ()


def test_the_language_model_of_a_multimodal_one_counts(quantised: Any) -> None:
    path = quantised(None, text_config={"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(EngineError, match="quant_method=awq"):
        planned(path, "1.2.1", 1)
