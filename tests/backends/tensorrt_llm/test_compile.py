"""The compiler's own steps, with an LLM that writes down its arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from djl_trtllm.backends.tensorrt_llm import compile as tensorrt_llm
from djl_trtllm.backends.tensorrt_llm import objects as tensorrt_llm_objects
from djl_trtllm.backends.tensorrt_llm.compiler import TensorRtLlmSpec
from tests.engines.helpers import write_checkpoint


class Calls:
    """What was called, in order, and what `save` raises."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.fails: Exception | None = None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A TensorRT-LLM; objects stay the plain data that describes them."""
    calls = Calls()

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            calls.names.append("LLM")
            calls.arguments = arguments

        def save(self, out: str) -> None:
            calls.names.append("save")
            if calls.fails is not None:
                raise calls.fails
            for name in ("config.json", "tokenizer.json"):
                Path(out, name).write_text("TensorRT-LLM's own")

        def shutdown(self) -> None:
            calls.names.append("shutdown")

    @contextmanager
    def watched() -> Iterator[None]:
        calls.names.append("watch")
        yield
        calls.names.append("unwatch")

    package = ModuleType("tensorrt_llm._tensorrt_engine")
    package.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm._tensorrt_engine", package)
    monkeypatch.setattr(tensorrt_llm_objects, "build_arguments", lambda data: data)
    monkeypatch.setattr(tensorrt_llm, "ending_with_ranks", watched)
    monkeypatch.setattr(tensorrt_llm, "die_with_parent", lambda: calls.names.append("lifeline"))
    return calls


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def spec_of(out: Path, **values: Any) -> TensorRtLlmSpec:
    places = {"checkpoint": "/models/it", "tokenizer_dir": "/models/tokenizer", "out": str(out)}
    return TensorRtLlmSpec(**{"arguments": {"dtype": "bfloat16"}, **places, **values})


def test_the_checkpoint_is_compiled_and_saved_with_ranks_watched(
    calls: Calls, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = out / "a" / "workspace"
    tensorrt_llm.compile_engine(spec_of(out, workspace=str(workspace)), out)
    assert calls.names == ["watch", "LLM", "unwatch", "save", "shutdown"]
    assert calls.arguments == {
        "model": "/models/it",
        "tokenizer": "/models/tokenizer",
        "workspace": str(workspace),
        "enable_build_cache": False,
        "dtype": "bfloat16",
        "kv_cache_config": {"class": "KvCacheConfig", "enable_block_reuse": False},
    }
    assert workspace.is_dir()
    assert capsys.readouterr().out == "@@phase convert\n@@phase save\n"


def test_memory_is_let_go_also_when_saving_fails(calls: Calls, out: Path) -> None:
    calls.fails = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        tensorrt_llm.compile_engine(spec_of(out), out)
    assert calls.names[-2:] == ["save", "shutdown"]


def test_what_tells_by_its_path_is_read_through_a_link_that_has_the_name(calls: Calls, out: Path) -> None:
    (out / "model").mkdir()
    spec = spec_of(out, checkpoint=str(out / "model"), workspace=str(out / "workspace"), converter_alias="chatglm3")
    tensorrt_llm.compile_engine(spec, out)
    link = Path(calls.arguments["model"])
    assert (link.parent, link.name, link.resolve()) == (out / "workspace", "chatglm3", out / "model")


@pytest.mark.parametrize("missing", ["converter_alias", "workspace"])
def test_without_a_name_or_a_place_for_the_link_the_checkpoint_itself_is_read(
    calls: Calls, out: Path, missing: str
) -> None:
    values = {"converter_alias": "chatglm3", "workspace": str(out / "workspace")} | {missing: None}
    tensorrt_llm.compile_engine(spec_of(out, **values), out)
    assert calls.arguments["model"] == "/models/it"


def test_the_whole_compiler_leaves_an_engine_beside_its_timing_cache(
    calls: Calls, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    left_out = ("hf_quant_config.json", "quantize_config.json", "quantization_config.json")
    for name in left_out:
        (checkpoint / name).write_text("{}")
    spec_of(out, checkpoint=str(checkpoint), tokenizer_dir=str(checkpoint)).save(tmp_path / "spec.json")
    monkeypatch.chdir(tmp_path)
    assert tensorrt_llm.main(["tensorrt_llm", str(tmp_path / "spec.json")]) == 0
    assert Path(os.getcwd()) == out  # where TensorRT-LLM writes it
    assert calls.names[0] == "lifeline"
    assert (out / "config.json").read_text() == "TensorRT-LLM's own"
    assert (out / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert not [name for name in left_out if (out / name).exists()]
