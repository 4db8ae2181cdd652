from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from djl_trtllm.backends.openvino.compiler import OpenVinoSpec
from djl_trtllm.backends.tensorrt_llm.compiler import TensorRtLlmSpec
from djl_trtllm.engines.spec import PHASE_MARK, CompileSpec, report_phase

PLACES = {"checkpoint": "/models/it", "tokenizer_dir": "/models/tokenizer", "out": "/engines/it"}


@pytest.mark.parametrize(
    "spec",
    [
        CompileSpec(**PLACES),
        OpenVinoSpec(**PLACES, workspace="/tmp/work", dtype="fp16", quantize="int8", trust_remote_code=True),
        TensorRtLlmSpec(**PLACES, arguments={"dtype": "auto", "build_config": {"class": "BuildConfig"}}),
        TensorRtLlmSpec(**PLACES, arguments={}, converter_alias="chatglm3"),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_the_compiler_reads_what_was_written_for_it(tmp_path: Path, spec: CompileSpec) -> None:
    spec.save(tmp_path / "spec.json")
    assert type(spec).load(tmp_path / "spec.json") == spec
    assert json.loads((tmp_path / "spec.json").read_text())["checkpoint"] == "/models/it"


def test_another_compilers_spec_is_refused(tmp_path: Path) -> None:
    CompileSpec(**PLACES).save(tmp_path / "spec.json")
    with pytest.raises(msgspec.ValidationError):
        OpenVinoSpec.load(tmp_path / "spec.json")


def test_nothing_lies_between_unless_it_is_said_where() -> None:
    assert CompileSpec(**PLACES).workspace is None
    assert TensorRtLlmSpec(**PLACES, arguments={}).converter_alias is None


def test_a_phase_is_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    report_phase("convert")
    assert capsys.readouterr().out == "@@phase convert\n" == f"{PHASE_MARK}convert\n"


def test_a_phase_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[object] = []
    monkeypatch.setattr("builtins.print", lambda *_, flush=False: flushed.append(flush))
    report_phase("convert")
    assert flushed == [True]
