"""The OpenVINO compiler's steps around the export; the export itself: test_openvino.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.openvino import compile as openvino
from djl_trtllm.backends.openvino.compiler import OpenVinoSpec
from djl_trtllm.backends.openvino.engine_files import NoAttentionError
from djl_trtllm.backends.openvino.loading_report import IncompleteCheckpointError
from tests.backends.openvino.specs import spec_of
from tests.engines.helpers import write_checkpoint


@pytest.fixture
def spec(tmp_path: Path) -> OpenVinoSpec:
    (tmp_path / "out").mkdir()
    return spec_of(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "out")


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_the_steps_are_reported_in_order(
    spec: OpenVinoSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quantize: str,
) -> None:
    steps: list[object] = []
    steps_of_main = (
        "die_with_parent",
        "export",
        "require_attention",
        "compress",
        "convert_tokenizer",
        "copy_identity_files",
    )
    for name in steps_of_main:
        monkeypatch.setattr(openvino, name, lambda *arguments, name=name: steps.append((name, *arguments)))
    spec = type(spec)(**{field: getattr(spec, field) for field in spec.__struct_fields__} | {"quantize": quantize})
    spec.save(tmp_path / "spec.json")
    assert openvino.main(["openvino", str(tmp_path / "spec.json")]) == 0
    out = tmp_path / "out"
    compressed = [] if quantize == "none" else [("compress", out / "openvino_model.xml", "int8")]
    assert steps == [
        ("die_with_parent",),
        ("export", spec, out),
        ("require_attention", out / "openvino_model.xml"),
        *compressed,
        ("convert_tokenizer", spec, out),
        ("copy_identity_files", Path(spec.checkpoint), Path(spec.tokenizer_dir), out),
    ]
    told = [line.removeprefix("@@phase ") for line in capsys.readouterr().out.splitlines()]
    assert told == [*(["compress"] if compressed else []), "tokenizer", "save"]


@pytest.mark.parametrize("error", [IncompleteCheckpointError, NoAttentionError])
def test_a_model_that_cannot_be_compiled_is_reported_in_one_line(
    spec: OpenVinoSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[Exception],
) -> None:
    def export(spec: OpenVinoSpec, out: Path) -> None:
        raise error("the reason")

    monkeypatch.setattr(openvino, "die_with_parent", lambda: None)
    monkeypatch.setattr(openvino, "export", export)
    spec.save(tmp_path / "spec.json")
    assert openvino.main(["openvino", str(tmp_path / "spec.json")]) == 1
    assert capsys.readouterr().out == "the reason\n"
