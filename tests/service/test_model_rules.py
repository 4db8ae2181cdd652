"""The rules about kinds of models and files run once the files are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from djl_trtllm.engine import Hardware
from djl_trtllm.errors import ConfigError, ModelError
from djl_trtllm.service import open_source, plan, prepare
from tests.engine.helpers import gpu_machine, write_checkpoint, write_engine_files, write_tensorrt_engine


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def test_the_kind_of_model_is_that_of_config_json(checkpoint: Path) -> None:
    environ = {"OPTION_BACKEND": "openvino", "OPTION_ROTARY_DIM": "64", "OPTION_USE_FUSED_MLP": "true"}
    config, _, _ = plan(open_source(checkpoint, environ))
    (note,) = config.notes
    assert note.endswith("is documented for GPT-J only, and this model is llama")


def test_a_compiled_engine_cannot_be_quantised(checkpoint: Path) -> None:
    write_engine_files(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    source = open_source(checkpoint, {"OPTION_BACKEND": "openvino", "OPTION_QUANTIZE": "int8"})
    with pytest.raises(ConfigError, match="the model is a compiled engine"):
        plan(source)
    plan(open_source(checkpoint, {"OPTION_BACKEND": "openvino", "OPTION_QUANTIZE": "none"}))


def test_a_compiled_engine_that_is_quantised_so_already_is_no_contradiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hardware, "probe", gpu_machine)
    path = write_tensorrt_engine(tmp_path / "engine")
    config = json.loads((path / "config.json").read_text())
    config["pretrained_config"]["quantization"] = {"quant_algo": "W4A16_AWQ"}
    (path / "config.json").write_text(json.dumps(config))
    plan(open_source(path, {"OPTION_QUANTIZE": "awq"}))
    with pytest.raises(ConfigError, match=r"option\.quantize=fp8 .*the model is a compiled engine"):
        plan(open_source(path, {"OPTION_QUANTIZE": "fp8"}))


def test_hf_model_id_is_the_model_that_is_served(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "serving.properties").write_text("option.model_id=nowhere\noption.max_input_len=9\n")
    _, layout, _ = plan(open_source(other, {"HF_MODEL_ID": str(checkpoint), "OPTION_BACKEND": "openvino"}))
    assert layout.path == checkpoint


def test_a_secret_in_a_model_id_is_not_told(checkpoint: Path) -> None:
    with pytest.raises(ModelError) as caught:
        plan(open_source(checkpoint, {"HF_MODEL_ID": "https://me:hunter2@host/model"}))
    assert "hunter2" not in str(caught.value)


def test_a_tokenizer_that_is_no_folder_is_named(checkpoint: Path) -> None:
    write_engine_files(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    environ = {"OPTION_BACKEND": "openvino", "OPTION_TOKENIZER_DIR": "/no/such/folder"}
    with pytest.raises(ModelError, match=r"option\.tokenizer=/no/such/folder \(environment variable OPTION_TOKENIZER"):
        prepare(open_source(checkpoint, environ))
