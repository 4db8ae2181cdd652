"""The OpenVINO compiler around the export: what it refuses, its steps, its files (the export: test_compile.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from djl_trtllm.backends.openvino import compile as openvino
from djl_trtllm.backends.openvino.compile import COMPILER, NO_ATTENTION, OpenVinoSpec, check_engine
from djl_trtllm.engines.cache import Manifest
from djl_trtllm.errors import EngineMismatchError
from tests.engines.helpers import write_checkpoint, write_engine_files
from tests.support.tables import by_table

STEPS = ("die_with_parent", "export", "require_attention", "compress", "convert_tokenizer", "copy_identity_files")


def spec_of(root: Path, *, quantize: str = "none", method: str | None = None) -> OpenVinoSpec:
    """What the compiler is asked for: a checkpoint in FP16, of weights that are quantised with `method`."""
    checkpoint = write_checkpoint(root / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    if method is not None:
        config["quantization_config"] = {"quant_method": method, "bits": 4}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (root / "out").mkdir()
    return OpenVinoSpec(
        checkpoint=str(checkpoint),
        tokenizer_dir=str(checkpoint),
        out=str(root / "out"),
        dtype="fp16",
        quantize=quantize,
        trust_remote_code=False,
    )


def run(spec: OpenVinoSpec, folder: Path) -> int:
    spec.save(folder / "spec.json")
    return openvino.main(["openvino", str(folder / "spec.json")])


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_the_steps_are_reported_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quantize: str
) -> None:
    steps: list[object] = []
    for name in STEPS:
        monkeypatch.setattr(openvino, name, lambda *arguments, name=name: steps.append((name, *arguments)))
    spec, out = spec_of(tmp_path, quantize=quantize), tmp_path / "out"
    assert run(spec, tmp_path) == 0
    compressed = [] if quantize == "none" else [("compress", out / "openvino_model.xml", "int8")]
    assert steps == [
        ("die_with_parent",),
        ("export", spec, out),
        ("require_attention", out / "openvino_model.xml"),
        *compressed,
        ("convert_tokenizer", spec, out),
        ("copy_identity_files", Path(spec.checkpoint), Path(spec.tokenizer_dir), out),
    ]
    phases = [line.removeprefix("@@phase ") for line in capsys.readouterr().out.splitlines()]
    assert phases == [*(["compress"] if compressed else []), "tokenizer", "save"]


@by_table("method", "package")
def test_a_quantised_checkpoint_whose_loader_is_missing_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str | None,
    package: str | None,
) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(openvino, "find_spec", lambda name: name if name in installed else None)
    for name in STEPS:
        monkeypatch.setattr(openvino, name, lambda *arguments: None)
    spec = spec_of(tmp_path, method=method)
    if package is not None:
        assert run(spec, tmp_path) == 1
        (line,) = capsys.readouterr().out.splitlines()
        assert f"{method} (quantization_config in" in line and f"with {package}, which is not installed" in line
        found = COMPILER.cause_of([line])
        assert found is not None and found[0].name == "quantised checkpoint"
        assert "before quantisation" in found[0].advice
        installed.add(package)
    assert run(spec, tmp_path) == 0


def test_a_model_without_attention_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    xml = tmp_path / "out" / "openvino_model.xml"
    text = "<net></net>"
    for name in STEPS:
        if name != "require_attention":
            monkeypatch.setattr(openvino, name, lambda *arguments: None)
    monkeypatch.setattr(openvino, "export", lambda *arguments: xml.write_text(text))
    spec = spec_of(tmp_path)
    assert run(spec, tmp_path) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{NO_ATTENTION}: openvino_model.xml has no attention layer")
    found = COMPILER.cause_of([line])
    assert found is not None and found[0].name == "unsupported architecture"
    text = '<net><layer type="ScaledDotProductAttention" /></net>'
    assert run(spec, tmp_path) == 0


@by_table("line", "cause")
def test_a_failure_of_openvinos_export_is_classified(line: str, cause: str) -> None:
    found = COMPILER.cause_of([line])
    assert found is not None and found[0].name == cause


# -- the files of an engine --------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_engine_files(tmp_path / "engine")


def problem_of(engine: Path) -> str:
    with pytest.raises(EngineMismatchError) as caught:
        check_engine(engine)
    assert "copy it again, or compile it again" in str(caught.value)
    return str(caught.value).partition("\n  - ")[2].splitlines()[0]


def test_a_whole_engine_is_its_manifest_and_needs_none(engine: Path) -> None:
    assert check_engine(engine) is None
    manifest = Manifest.of(engine, backend="openvino", checkpoint="x", options={}, versions={}, platform="x86_64")
    manifest.write(engine)
    assert check_engine(engine) == manifest
    (engine / "openvino_model.bin").write_bytes(bytes(999))
    assert problem_of(engine).startswith("openvino_model.bin: truncated, 999 of 1000 bytes")


@pytest.mark.parametrize(
    ("constants", "needed"),
    [([(0, 10), (500, 100), (20, 30)], 600), ([], 1)],
)
def test_the_weights_reach_as_far_as_the_furthest_constant_and_are_never_empty(
    engine: Path, constants: list[tuple[int, int]], needed: int
) -> None:
    data = "".join(f'<data element_type="f16" offset="{at}" size="{size}" />' for at, size in constants)
    (engine / "openvino_model.xml").write_text(f"<net>{data}</net>\n")
    (engine / "openvino_model.bin").write_bytes(bytes(needed))
    assert check_engine(engine) is None
    (engine / "openvino_model.bin").write_bytes(bytes(needed - 1))
    expected = f"openvino_model.bin: truncated, {needed - 1} bytes where openvino_model.xml refers to {needed}"
    assert problem_of(engine) == expected


def test_files_that_are_missing_cut_off_or_cannot_be_read_are_named(engine: Path) -> None:
    xml, weights = engine / "openvino_model.xml", engine / "openvino_model.bin"
    weights.unlink()
    assert problem_of(engine) == "openvino_model.bin: missing"
    weights.symlink_to(weights.name)
    assert "openvino_model.bin: " in problem_of(engine) and "symbolic links" in problem_of(engine)
    xml.write_bytes(xml.read_bytes()[:40])
    assert problem_of(engine).startswith("openvino_model.xml: not a complete OpenVINO model, 40 bytes")
    xml.write_text("net></net>")
    assert problem_of(engine).startswith("openvino_model.xml: not a complete OpenVINO model, 10 bytes")
    xml.unlink()
    assert problem_of(engine) == "openvino_model.xml: missing"
    xml.mkdir()
    assert problem_of(engine).startswith("openvino_model.xml: cannot be read (")
