"""The OpenVINO compiler's steps around the export; the export itself: test_openvino.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.openvino import compile as openvino
from djl_trtllm.backends.openvino.compiler import OpenVinoSpec
from tests.engines.helpers import write_checkpoint


@pytest.fixture
def spec(tmp_path: Path) -> OpenVinoSpec:
    checkpoint = str(write_checkpoint(tmp_path / "checkpoint"))
    (tmp_path / "out").mkdir()
    return OpenVinoSpec(
        checkpoint=checkpoint,
        tokenizer_dir=checkpoint,
        out=str(tmp_path / "out"),
        dtype="fp16",
        quantize="none",
        trust_remote_code=False,
    )


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_the_steps_are_told_in_order(
    spec: OpenVinoSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quantize: str,
) -> None:
    steps: list[object] = []
    for name in ("die_with_parent", "export", "compress", "convert_tokenizer", "copy_files"):
        monkeypatch.setattr(openvino, name, lambda *arguments, name=name: steps.append((name, *arguments)))
    spec = type(spec)(**{field: getattr(spec, field) for field in spec.__struct_fields__} | {"quantize": quantize})
    spec.save(tmp_path / "spec.json")
    assert openvino.main(["openvino", str(tmp_path / "spec.json")]) == 0
    out = tmp_path / "out"
    compressed = [] if quantize == "none" else [("compress", out / "openvino_model.xml", "int8")]
    assert steps == [
        ("die_with_parent",),
        ("export", spec, out),
        *compressed,
        ("convert_tokenizer", spec, out),
        ("copy_files", spec, out),
    ]
    told = [line.removeprefix("@@phase ") for line in capsys.readouterr().out.splitlines()]
    assert told == [*(["compress"] if compressed else []), "tokenizer", "save"]


def test_configuration_and_tokenizer_are_copied_as_they_are_and_weights_are_not(
    spec: OpenVinoSpec, tmp_path: Path
) -> None:
    checkpoint, out = Path(spec.checkpoint), Path(spec.out)
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    (out / "config.json").write_text("rewritten by the exporter")
    openvino.copy_files(spec, out)
    copied = {path.name: path.read_bytes() for path in out.iterdir()}
    expected = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert copied == {name: (checkpoint / name).read_bytes() for name in expected}


def test_pickled_weights_are_not_copied_either(spec: OpenVinoSpec) -> None:
    (Path(spec.checkpoint) / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "pytorch_model.bin.index.json"):
        (Path(spec.checkpoint) / name).touch()
    openvino.copy_files(spec, Path(spec.out))
    assert not [path.name for path in Path(spec.out).iterdir() if "model" in path.name]


def test_the_tokenizers_own_directory_counts_before_the_checkpoint(spec: OpenVinoSpec, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("another")
    places = {"checkpoint": spec.checkpoint, "tokenizer_dir": str(tokenizer), "out": spec.out}
    openvino.copy_files(OpenVinoSpec(**places, dtype="fp16", quantize="none", trust_remote_code=False), Path(spec.out))
    assert Path(spec.out, "tokenizer.json").read_text() == "another"
    assert Path(spec.out, "config.json").exists()
