from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from djl_trtllm.engines.file_hashes import FileHashes
from djl_trtllm.engines.identity import checkpoint_identity, copy_identity_files, identity_files
from djl_trtllm.errors import ModelError

IDENTITY = "sha256:5522f077077760885474add44c76ed7f3185b54b1ceca983a837a7f30765fcec"


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


def test_every_file_of_configuration_tokenizer_and_weights_counts(tmp_path: Path) -> None:
    names = [
        "config.json", "generation_config.json", "quantize_config.json", "quantization_config.json",
        "hf_quant_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "qwen.tiktoken",
        "chat_template.json", "chat_template.jinja",
    ]  # fmt: skip
    safetensors = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    pickled = ["pytorch_model-00001.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth"]
    others = ["README.md", "model.json", "training_args.bin", "optimizer.json"]
    for name in [*names, *pickled, *others]:
        (tmp_path / name).touch()
    assert sorted(path.name for path in identity_files(tmp_path)) == sorted(names + pickled)
    for name in safetensors:
        (tmp_path / name).touch()
    assert sorted(path.name for path in identity_files(tmp_path)) == sorted(names + safetensors)


def test_an_identity_is_the_same_in_every_version_of_this_program(tmp_path: Path) -> None:
    # Another identity is another engine: a release that changes it compiles everything again.
    for name in ("config.json", "model.safetensors", "another.safetensors"):
        (tmp_path / name).write_text(name)
    assert checkpoint_identity(tmp_path) == IDENTITY


def test_the_hashes_are_those_that_are_remembered(copy: Path) -> None:
    class Remembered(FileHashes):
        def sha256(self, path: Path) -> str:
            return "0" * 64

    known = checkpoint_identity(copy, hashes=Remembered())
    assert known != checkpoint_identity(copy)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(b"\1" * len(content))
    assert checkpoint_identity(copy, hashes=Remembered()) == known


def test_a_file_that_cannot_be_read_is_reported(copy: Path) -> None:
    class Failing(FileHashes):
        def sha256(self, path: Path) -> str:
            raise OSError(5, "Input/output error")

    with pytest.raises(ModelError, match=f"cannot read the checkpoint {copy}: .*Input/output error"):
        checkpoint_identity(copy, hashes=Failing())


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
    for broken in ("{", '"auto_map"'):
        (copy / "config.json").write_text(broken)
        assert "modeling_own.py" not in {path.name for path in identity_files(copy)}


def test_a_tokenizer_in_another_directory_counts(checkpoint: Path, copy: Path) -> None:
    assert checkpoint_identity(checkpoint, copy) != checkpoint_identity(checkpoint)
    assert checkpoint_identity(checkpoint, checkpoint) == checkpoint_identity(checkpoint)


# -- copies in an engine's directory -----------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_configuration_and_tokenizer_are_copied_as_they_are_and_weights_are_not(copy: Path, out: Path) -> None:
    (copy / "model.safetensors.index.json").write_text("{}")
    (out / "config.json").write_text("rewritten by the exporter")
    copy_identity_files(copy, copy, out)
    copied = {path.name: path.read_bytes() for path in out.iterdir()}
    expected = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert copied == {name: (copy / name).read_bytes() for name in expected}


def test_what_is_left_out_by_name_stays_as_the_compiler_wrote_it(copy: Path, out: Path) -> None:
    (out / "config.json").write_text("the engine's own")
    copy_identity_files(copy, copy, out, without=("config.json",))
    assert (out / "config.json").read_text() == "the engine's own"
    assert (out / "tokenizer.json").exists()


def test_pickled_weights_are_not_copied_either(copy: Path, out: Path) -> None:
    (copy / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "pytorch_model.bin.index.json"):
        (copy / name).touch()
    copy_identity_files(copy, copy, out)
    assert not [path.name for path in out.iterdir() if "model" in path.name]


def test_the_tokenizers_own_directory_counts_before_the_checkpoint(copy: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("another")
    copy_identity_files(copy, tmp_path / "tokenizer", out)
    assert (out / "tokenizer.json").read_text() == "another"
    assert (out / "config.json").exists()
