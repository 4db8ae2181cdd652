"""Quantised checkpoints that need a further package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from djl_trtllm.backends.openvino import stored_formats
from djl_trtllm.backends.openvino.compile import main
from djl_trtllm.backends.openvino.compiler import COMPILER
from djl_trtllm.backends.openvino.stored_formats import StoredFormatError, require_loader
from tests.backends.openvino.specs import spec_of
from tests.engines.helpers import write_checkpoint


def quantised(root: Path, method: str | None) -> Path:
    checkpoint = write_checkpoint(root / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    if method is not None:
        config["quantization_config"] = {"quant_method": method, "bits": 4}
    (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("gptq", "gptqmodel"),
        ("awq", "gptqmodel"),
        ("bitsandbytes", "bitsandbytes"),
        ("compressed-tensors", "compressed_tensors"),
    ],
)
def test_a_format_whose_package_is_missing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, package: str
) -> None:
    checkpoint = quantised(tmp_path, method)
    installed: set[str] = set()
    monkeypatch.setattr(stored_formats, "find_spec", lambda name: name if name in installed else None)
    with pytest.raises(StoredFormatError, match=f"quantised with {method} .* with {package}, which is not installed"):
        require_loader(checkpoint)
    installed.add(package)
    require_loader(checkpoint)


@pytest.mark.parametrize("method", [None, "fp8", "mxfp4"])
def test_other_checkpoints_are_left_to_transformers(tmp_path: Path, method: str | None) -> None:
    require_loader(quantised(tmp_path, method))


def test_the_compiler_says_so_in_one_line_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stored_formats, "find_spec", lambda name: None)
    monkeypatch.setattr("djl_trtllm.backends.openvino.compile.die_with_parent", lambda: None)
    spec_of(quantised(tmp_path, "gptq"), tmp_path / "out").save(tmp_path / "spec.json")
    assert main(["openvino", str(tmp_path / "spec.json")]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    found = COMPILER.cause_of([line])
    assert found is not None and found[0].name == "quantised checkpoint"
    assert "before quantisation" in found[0].advice
