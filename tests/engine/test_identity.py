from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from djl_trtllm.engine.identity import checkpoint_identity, identity_files


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def test_the_same_content_elsewhere_is_the_same_checkpoint(checkpoint: Path, copy: Path) -> None:
    assert checkpoint_identity(copy) == checkpoint_identity(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_one_changed_byte_is_another_checkpoint(checkpoint: Path, copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[-2] ^= 1
    (copy / name).write_bytes(content)
    assert checkpoint_identity(copy) != checkpoint_identity(checkpoint)


def test_a_renamed_file_is_another_checkpoint(checkpoint: Path, copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    assert checkpoint_identity(copy) != checkpoint_identity(checkpoint)


def test_what_does_not_reach_the_engine_does_not_count(checkpoint: Path, copy: Path) -> None:
    (copy / "serving.properties").write_text("option.max_rolling_batch_size=8")
    (copy / "README.md").write_text("a model")
    (copy / "model.py").write_text("# a handler")
    (copy / "engine").mkdir()
    (copy / "engine" / "config.json").write_text("{}")
    assert checkpoint_identity(copy) == checkpoint_identity(checkpoint)


def test_pickled_weights_count_only_without_safetensors(copy: Path) -> None:
    (copy / "pytorch_model.bin").write_bytes(b"pickle")
    assert "pytorch_model.bin" not in {path.name for path in identity_files(copy)}
    (copy / "model.safetensors").unlink()
    assert "pytorch_model.bin" in {path.name for path in identity_files(copy)}


def test_code_counts_where_the_model_loads_its_own(copy: Path) -> None:
    (copy / "modeling_own.py").write_text("class Own: ...")
    assert "modeling_own.py" not in {path.name for path in identity_files(copy)}
    (copy / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}')
    assert "modeling_own.py" in {path.name for path in identity_files(copy)}


def test_a_tokenizer_in_another_directory_counts(checkpoint: Path, copy: Path) -> None:
    assert checkpoint_identity(checkpoint, copy) != checkpoint_identity(checkpoint)
    assert checkpoint_identity(checkpoint, checkpoint) == checkpoint_identity(checkpoint)
