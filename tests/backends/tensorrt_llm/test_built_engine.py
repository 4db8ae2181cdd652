"""Compiled engines: the compiler's own steps and failures, what an engine's config.json says, and whether it fits."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from djl_trtllm.backends.base import Bound, Built
from djl_trtllm.backends.tensorrt_llm import compile as tensorrt_llm, names as tensorrt_llm_objects
from djl_trtllm.backends.tensorrt_llm.built_engine import (
    BuiltEngine,
    built_limits,
    check_built_engine,
    read_built_engine,
)
from djl_trtllm.backends.tensorrt_llm.compile import COMPILER as TENSORRT_LLM, TensorRtLlmSpec
from djl_trtllm.config import Config, load
from djl_trtllm.engines.cache import Manifest
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import EngineMismatchError
from tests.engines.helpers import H200, configured, gpu_machine, write_checkpoint, write_tensorrt_engine
from tests.support.tables import by_rows, by_table, table

BUILT: dict[str, Any] = table(__file__, "built")
"""What TensorRT-LLM 1.2 writes for a Llama on 16 GPUs, less what nothing here looks at."""
TWO = gpu_machine("1.2.1", 2)


def engine_dir(path: Path, config: object = BUILT) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def engine(**values: Any) -> BuiltEngine:
    """An engine with limits of 8192 and no flag that matters, but for the values given."""
    limits: dict[str, Any] = {"max_batch_size": 64, "max_seq_len": 8192, "max_num_tokens": 8192, "max_beam_width": 1}
    return BuiltEngine(Path("/engines/llama"), **(limits | values))


def manifest(platform: str) -> Manifest:
    return Manifest(
        format=1, backend="tensorrt", checkpoint="", options={}, versions={}, platform=platform, created="", files={}
    )


def notes(config: Config, built: BuiltEngine, hardware: Hardware = TWO, **further: Any) -> list[str]:
    return check_built_engine(config, built, hardware, **{"environ": {}, **further})


def mismatches(config: Config, built: BuiltEngine, hardware: Hardware = TWO, **further: Any) -> list[str]:
    with pytest.raises(EngineMismatchError) as caught:
        notes(config, built, hardware, **further)
    first, *lines, last = str(caught.value).splitlines()
    assert first == "the engine /engines/llama does not fit:" and "djl-trtllm compile CHECKPOINT OUT" in last
    assert all(line.startswith("  - ") for line in lines)
    return [line.removeprefix("  - ") for line in lines]


def test_what_an_engine_was_compiled_with_is_read_from_its_config(tmp_path: Path) -> None:
    built = vars(read_built_engine(engine_dir(tmp_path)))
    assert built.pop("directory") == tmp_path
    flags = built.pop("built_with")
    assert (flags["nccl_plugin"], flags["opt_num_tokens"]) == ("auto", 64)
    assert built == table(__file__, "read")
    for off in (None, False, "disable"):
        config = {"build_config": {"plugin_config": {"lora_plugin": off}}}
        assert not read_built_engine(engine_dir(tmp_path, config)).lora


@by_table("config")
def test_what_a_config_does_not_tell_is_not_known_and_never_a_mismatch(tmp_path: Path, config: dict[str, Any]) -> None:
    built = read_built_engine(engine_dir(tmp_path, config))
    assert built.world_size == 1 and built.max_batch_size is None and built.use_paged_context_fmha is None
    everything = configured(
        max_rolling_batch_size=999, max_num_tokens=99999, max_seq_len=99999, dtype="fp16", kv_cache_dtype="int8",
        enable_kv_cache_reuse="true", enable_chunked_prefill="true", tokens_per_block=64,
    )  # fmt: skip
    assert check_built_engine(everything, built, gpu_machine(None), environ={}) == []


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineMismatchError, match=r"config\.json is missing"):
        read_built_engine(tmp_path)
    with pytest.raises(EngineMismatchError, match=r"not that of a compiled engine: it has no `build_config`"):
        read_built_engine(engine_dir(tmp_path, {"architectures": []}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineMismatchError, match=r"config\.json is not valid JSON"):
        read_built_engine(tmp_path)


def test_an_engine_of_before_0_8_is_refused_with_the_command(tmp_path: Path) -> None:
    config: dict[str, Any] = {"builder_config": {}, "plugin_config": {}}
    (engine_dir(tmp_path, config) / "rank0.engine").touch()
    with pytest.raises(EngineMismatchError, match=r"before 0\.8 .*djl-trtllm compile"):
        read_built_engine(tmp_path)


@by_table("values", "chunked", "longest")
def test_the_longest_prompt_is_bounded_by_what_the_executor_bounds_it_by(
    values: dict[str, Any], chunked: bool, longest: int | None
) -> None:
    assert engine(**values).longest_prompt(chunked_prefill=chunked) == longest


@pytest.mark.parametrize("compiled", ["1.2.0", "1.2.1rc1", "0.16.0"])
def test_an_engine_is_read_by_its_own_release_only(compiled: str) -> None:
    (line,) = mismatches(configured(), engine(version=compiled))
    assert line.startswith(f"TensorRT-LLM {compiled} compiled it and 1.2.1 is installed")
    assert f"tensorrt-llm=={compiled}" in line


@pytest.mark.parametrize(
    ("compiled", "installed"),
    [("1.2.1", "1.2.1+cu130"), (None, "1.2.1"), ("1.2.0", "of unknown version"), ("nightly", "1.2.1")],
)
def test_versions_that_are_one_release_or_not_known_fit(compiled: str | None, installed: str) -> None:
    assert notes(configured(), engine(version=compiled), gpu_machine(installed)) == []


def test_an_engine_runs_on_the_gpu_architecture_it_was_compiled_for() -> None:
    (line,) = mismatches(configured(), engine(), TWO, manifest=manifest("sm_80"))
    assert line == "it was compiled for sm_80, and NVIDIA H200 is sm_90"
    for platform in ("sm_90", "unknown", "x86_64"):
        assert notes(configured(), engine(), TWO, manifest=manifest(platform)) == []
    unknown = Hardware((type(H200)(),), "1.2.1", 1)
    assert notes(configured(), engine(), unknown, manifest=manifest("sm_80")) == []


def test_every_rank_needs_a_gpu() -> None:
    four = engine(tp_size=2, pp_size=2, world_size=4)
    assert notes(configured(), four, gpu_machine(gpus=4)) == []
    (line,) = mismatches(configured(), four, gpu_machine(gpus=1))
    assert line.startswith(
        "it was compiled for 4 GPUs (tensor parallel 2 x pipeline parallel 2), and 1 GPU is visible;"
    )
    assert "trtllm-llmapi-launch" in line


def test_gpus_of_other_machines_count_where_the_ranks_there_are_launched() -> None:
    built, here, launched = engine(tp_size=8, world_size=8), gpu_machine(gpus=4), {"TLLM_SPAWN_PROXY_PROCESS": "1"}
    assert notes(configured(), built, here, environ=launched) == []
    for name in ("num_nodes", "cluster_size"):
        assert notes(configured(**{name: 2}), built, here, environ=launched) == []
        (line,) = mismatches(configured(**{name: 2}), built, gpu_machine(gpus=2), environ=launched)
        assert f"2 GPUs are visible on this machine with option.{name}=2" in line
        (line,) = mismatches(configured(**{name: 2}), built, here)
        assert "start the server with trtllm-llmapi-launch" in line


class Compared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options beside an engine: parts of the one mismatch, or a part of each note, or neither."""

    options: dict[str, Any]
    engine: dict[str, Any]
    mismatch: list[str] = []
    notes: list[str] = []


COMPARED = msgspec.json.decode(Path(__file__).with_name("built_engine.json").read_bytes(), type=list[Compared])


@by_rows("case", COMPARED)
def test_an_option_is_compared_with_what_the_engine_was_compiled_with(case: Compared) -> None:
    config, built = configured(**case.options), engine(**case.engine)
    if case.mismatch:
        (line,) = mismatches(config, built)
        assert [part for part in case.mismatch if part not in line] == []
    else:
        found = notes(config, built)
        assert len(found) == len(case.notes), found
        assert [part for part, line in zip(case.notes, found, strict=True) if part not in line] == []


def test_every_mismatch_is_reported_at_once_with_where_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_num_sequences=128\noption.tensor_parallel_degree=4\n")
    config = load(tmp_path, {"OPTION_MAX_SEQ_LEN": "16384"})
    built = engine(version="1.0.0", tp_size=2, world_size=2)
    assert mismatches(config, built, gpu_machine("1.2.1", 1), manifest=manifest("sm_100")) == [
        "TensorRT-LLM 1.0.0 compiled it and 1.2.1 is installed: an engine is read by its own release only; install "
        "tensorrt-llm==1.0.0, or use its container",
        "it was compiled for sm_100, and NVIDIA H200 is sm_90",
        "it was compiled for 2 GPUs (tensor parallel 2 x pipeline parallel 1), and 1 GPU is visible; with GPUs of "
        "several machines, start the server with trtllm-llmapi-launch",
        f"option.tensor_parallel_degree=4 ({tmp_path}/serving.properties:2): the engine was compiled with tp_size 2",
        "option.max_seq_len=16384 (environment variable OPTION_MAX_SEQ_LEN): the engine's max_seq_len is 8192",
        f"option.max_num_sequences=128 ({tmp_path}/serving.properties:1): the engine's max_batch_size is 64",
    ]


# -- what an engine's config.json says, as options ---------------------------------------------------------------------


SIZES: dict[str, Any] = {
    "max_batch_size": 256,
    "max_input_len": 2048,
    "max_seq_len": 3072,
    "max_num_tokens": 8192,
    "max_beam_width": 1,
}


def limits(built: dict[str, Any] | None = None, **options: object) -> Built:
    return built_limits(configured(**options), BuiltEngine(Path("/engine"), **SIZES | (built or {})))


@by_table("built", "options", "defaults", "bounds")
def test_limits_are_the_engines_within_what_the_user_set(
    built: dict[str, Any], options: dict[str, Any], defaults: dict[str, Any], bounds: dict[str, Any]
) -> None:
    """The table has what differs from an engine of 256 sequences of 3,072 tokens without options."""
    usual, found = table(__file__, "limits_of_an_engine"), limits(built, **options)
    assert found.where == "build_config in /engine/config.json"
    wanted = usual["defaults"] | defaults
    assert found.defaults == {name: value for name, value in wanted.items() if value is not None}
    wanted = usual["bounds"] | bounds
    assert found.bounds == {name: Bound(*bound) for name, bound in wanted.items() if bound is not None}


def test_what_config_json_does_not_have_stays_as_it_is() -> None:
    built = built_limits(configured(), BuiltEngine(Path("/engine")))
    assert built.defaults == {} and built.bounds == {}


def test_an_engine_of_before_0_11_has_prompt_and_output_and_no_sum_of_them(tmp_path: Path) -> None:
    path = write_tensorrt_engine(
        tmp_path / "engine", max_seq_len=None, max_input_len=2048, max_output_len=1024, max_num_tokens=None
    )
    engine = read_built_engine(path)
    assert (engine.max_seq_len, engine.max_output_len) == (3072, 1024)
    built = built_limits(configured(), engine)
    assert (built.defaults["max_seq_len"], built.defaults["max_output_len"]) == (3072, 1024)
    assert read_built_engine(write_tensorrt_engine(path, max_seq_len=None, max_input_len=2048)).max_seq_len is None


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
    monkeypatch.setattr(tensorrt_llm, "prepare_mpi", lambda: None)
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


# -- what is known of the compilers: their logs, and what they need ----------------------------------------------------


LABELS = table(__file__, "labels")


@by_rows(("line", "phase"), LABELS)
def test_tensorrt_llms_own_lines_tell_its_phases(line: str, phase: str) -> None:
    assert TENSORRT_LLM.phase_after("start", line) == phase


# No line has two of the words that a class is known by: it would be found with either of them gone.
TENSORRT_FAILURES = table(__file__, "tensorrt_failures")


@by_rows(("line", "cause"), TENSORRT_FAILURES)
def test_a_failure_of_tensorrt_llm_is_classified(line: str, cause: str) -> None:
    found = TENSORRT_LLM.cause_of(["Traceback (most recent call last):", line, "  at the end"])
    assert found is not None
    assert (found[0].name, found[1]) == (cause, line)
