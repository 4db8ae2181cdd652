"""What the plans of all backends derive alike, and the compilers that they name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from djl_trtllm.backends.openvino.compile import OpenVinoSpec
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.scripted.backend import ScriptedPlan
from djl_trtllm.backends.tensorrt_llm.compile import TensorRtLlmSpec
from djl_trtllm.engines import compiler as lifeline
from djl_trtllm.engines.cache import Manifest
from djl_trtllm.engines.compiler import PHASE_MARK, Cause, Compiler, CompileSpec, report_phase
from djl_trtllm.engines.plan import (
    checkpoint_identity,
    copy_identity_files,
    identity_files,
    planned_adapters,
    planned_length,
    planned_sequences,
    planned_text_length,
)
from djl_trtllm.errors import CompilerMissingError, ModelError
from djl_trtllm.model import inspect
from djl_trtllm.model.adapter import AdapterLimits
from tests.engines.helpers import CONTEXT, CPU_ONLY, HIDDEN, LAYERS, alive, configured
from tests.support.processes import wait_until
from tests.support.tables import by_table

IDENTITY = "sha256:5522f077077760885474add44c76ed7f3185b54b1ceca983a837a7f30765fcec"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_one_changed_byte_is_another_checkpoint(checkpoint: Path, copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[-2] ^= 1
    (copy / name).write_bytes(content)
    assert checkpoint_identity(copy) != checkpoint_identity(checkpoint)


def test_what_reaches_the_engine_counts_and_nothing_else(checkpoint: Path, copy: Path) -> None:
    for name in ("serving.properties", "README.md", "model.py", "engine/config.json"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("{}")
    identity = checkpoint_identity(copy)
    assert identity == checkpoint_identity(checkpoint) == checkpoint_identity(checkpoint, checkpoint)
    assert checkpoint_identity(checkpoint, copy) != identity  # a tokenizer in another directory
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    assert checkpoint_identity(copy) != identity


def test_the_hashes_are_those_that_are_remembered(copy: Path) -> None:
    hashes = Mock(sha256=Mock(return_value="0" * 64))
    known = checkpoint_identity(copy, hashes=hashes)
    assert known != checkpoint_identity(copy)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(b"\1" * len(content))
    assert checkpoint_identity(copy, hashes=hashes) == known
    hashes.sha256.side_effect = OSError(5, "Input/output error")
    with pytest.raises(ModelError, match=f"cannot read the checkpoint {copy}: .*Input/output error"):
        checkpoint_identity(copy, hashes=hashes)


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


def test_code_counts_where_the_model_loads_its_own(copy: Path) -> None:
    (copy / "modeling_own.py").write_text("class Own: ...")
    assert "modeling_own.py" not in {path.name for path in identity_files(copy)}
    (copy / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}')
    assert "modeling_own.py" in {path.name for path in identity_files(copy)}
    for broken in ("{", '"auto_map"'):
        (copy / "config.json").write_text(broken)
        assert "modeling_own.py" not in {path.name for path in identity_files(copy)}


# -- copies in an engine's directory -----------------------------------------------------------------------------------


def test_configuration_and_tokenizer_are_copied_as_they_are_and_weights_are_not(copy: Path, tmp_path: Path) -> None:
    out, tokenizer = tmp_path / "out", tmp_path / "tokenizer"
    out.mkdir()
    tokenizer.mkdir()
    (copy / "model.safetensors.index.json").write_text("{}")
    (out / "config.json").write_text("rewritten by the exporter")
    copy_identity_files(copy, copy, out)
    expected = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        name: (copy / name).read_bytes() for name in expected
    }
    (copy / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "pytorch_model.bin.index.json"):
        (copy / name).touch()
    (out / "config.json").write_text("the engine's own")
    (tokenizer / "tokenizer.json").write_text("another")
    copy_identity_files(copy, tokenizer, out, without=("config.json",))
    assert sorted(path.name for path in out.iterdir()) == sorted(expected)
    assert (out / "config.json").read_text() == "the engine's own"
    assert (out / "tokenizer.json").read_text() == "another"


def scripted(checkpoint: Path, **options: object) -> ScriptedPlan:
    """The plan of the backend that has no engine."""
    made = plan_engine(configured(backend="scripted", **options), inspect(checkpoint), CPU_ONLY)
    assert isinstance(made, ScriptedPlan)
    return made


def test_a_plan_without_an_engine_of_its_own_compiles_and_changes_nothing(checkpoint: Path) -> None:
    plan, config = scripted(checkpoint), configured()
    assert plan.settled(config) is config and plan.offline
    assert [plan.build_options, plan.served_with, plan.built_limits, plan.effects, plan.versions] == [{}] * 5
    assert [plan.recipe, plan.platform, plan.machine, plan.reasons] == [""] * 4
    assert (plan.compiler, plan.gpus, plan.stream_interval, plan.send_interval, plan.asked) == (None, 0, 1, 0.0, {})
    assert (plan.task, plan.notes, plan.engine_dir, plan.draft) == ("generate", (), None, None)
    assert [replace(plan, max_sequences=most).lookahead for most in (1, 11, 12, 64, 68)] == [2, 2, 3, 16, 16]


def test_adapters_are_bounded_by_their_rank_and_the_models_shape_where_they_are_on(checkpoint: Path) -> None:
    shape = inspect(checkpoint).shape
    assert planned_adapters(configured(max_lora_rank=8), shape) is None
    found = planned_adapters(configured(enable_lora=True, max_lora_rank=8), shape)
    assert found is not None and "max_lora_rank=8" in found.rank_setting
    assert found == AdapterLimits(max_rank=8, rank_setting=found.rank_setting, hidden=HIDDEN, layers=LAYERS)


@by_table("options", "sequences")
def test_as_many_sequences_run_as_both_limits_allow(options: dict[str, int], sequences: int) -> None:
    assert planned_sequences(configured(**options)) == sequences


@by_table("options", "length", "asked")
def test_a_sequence_is_at_most_the_models_context_and_who_asked_for_more_reads_why(
    checkpoint: Path, options: dict[str, int], length: int, asked: str
) -> None:
    notes: list[str] = []
    assert planned_length(configured(**options), inspect(checkpoint).shape, notes) == length
    assert len(notes) == bool(asked)
    for note in notes:
        assert f"{CONTEXT} tokens, the model's context" in note and asked in note


@by_table("options", "most", "length")
def test_a_text_has_the_length_that_is_set_or_as_many_tokens_as_memory_allows(
    checkpoint: Path, options: dict[str, int], most: int | None, length: int
) -> None:
    head: Any = SimpleNamespace(max_length=most)
    assert planned_text_length(configured(**options), inspect(checkpoint).shape, head, []) == length


def test_a_backend_without_an_engine_has_nothing_to_compile_check_or_load(copy: Path, tmp_path: Path) -> None:
    plan = scripted(copy, trust_remote_code="true", engine_cache_dir=tmp_path, stream_interval="4")
    manifest = cast("Manifest", None)  # nobody looks at it
    for attempt in (
        lambda: plan.compile_spec(tmp_path),
        lambda: plan.check_whole(tmp_path),
        lambda: plan.check_fit(tmp_path, manifest),
    ):
        with pytest.raises(ValueError, match="backend scripted"):
            attempt()
    assert plan.compiler is None
    assert (plan.build_options, plan.served_with, plan.versions, plan.gpus) == ({}, {}, {}, 0)
    assert (plan.details(), plan.describe()) == ((), f"backend scripted: {plan.reason}")
    assert (plan.source, plan.tokenizer_dir, plan.hash_store) == (copy, copy, tmp_path / "hashes")
    assert (plan.engine_dir, plan.at(tmp_path).engine_dir, plan.stream_interval) == (None, tmp_path, 4)
    # Only a checkpoint with code of its own needs the hub.
    assert not plan.offline and scripted(copy).offline
    key = plan.cache_key
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("1e-05", "2e-05"))
    assert scripted(copy).cache_key != key


# -- compilers ---------------------------------------------------------------------------------------------------------


PLACES: dict[str, Any] = {"checkpoint": "/models/it", "tokenizer_dir": "/models/tokenizer", "out": "/engines/it"}


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
    CompileSpec(**PLACES).save(tmp_path / "spec.json")
    with pytest.raises(msgspec.ValidationError):  # another compiler's spec
        OpenVinoSpec.load(tmp_path / "spec.json")


def test_a_phase_is_a_line_of_its_own_and_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = Mock()
    monkeypatch.setattr("builtins.print", printed)
    report_phase("convert")
    printed.assert_called_once_with(f"{PHASE_MARK}convert", flush=True)


# -- A process of its own for each test, because it ends by a signal.


# The file alone: the package takes a second to import.
_PROGRAM = """
import runpy, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
runpy.run_path(sys.argv[1])["die_with_parent"]()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("leads_a_group", "status"), [(True, -signal.SIGKILL), (False, 1)])
def test_a_compiler_whose_parent_is_gone_ends_with_all_of_its_group(leads_a_group: bool, status: int) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(lifeline.__file__)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=leads_a_group
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.stdin.write(b"not the end yet")
            process.stdin.flush()
            assert alive(child) and process.poll() is None
            process.stdin.close()
            assert process.wait(300) == status
            if leads_a_group:
                wait_until(lambda: not alive(child))
            else:
                assert alive(child)
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            process.kill()


def test_a_process_that_is_done_does_not_wait_for_its_parent() -> None:
    program = "import runpy, sys, threading; runpy.run_path(sys.argv[1])['die_with_parent']()\n"
    program += "print([thread.name for thread in threading.enumerate()], flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(lifeline.__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"['MainThread', 'parent-watch']\n"
        try:
            assert process.wait(300) == 0
        finally:
            process.kill()


MEMORY = Cause("memory", re.compile("no memory"), "buy some")
OTHER = Cause("other", re.compile("^Error"), "look")
COMPILER = Compiler(
    module="some.compiler",
    packages=("pytest", "no-such-package", "packaging", "nor-this"),
    install="pip install them",
    phases=("load", "convert", "save"),
    causes=(MEMORY, OTHER),
    phase_lines={"load": re.compile("Loading"), "convert": re.compile("Converting"), "save": re.compile("Saving")},
)


def test_a_line_begins_a_later_phase() -> None:
    silent = Compiler("m", (), "", ("load", "save"), (), {"save": re.compile("Saving")})
    for compiler, phase, line, next_phase in (
        (COMPILER, "load", "[1/2] Converting", "convert"),
        (COMPILER, "load", "[2/2] Saving", "save"),
        (COMPILER, "load", "anything", None),
        (COMPILER, "convert", "Loading", None),
        (COMPILER, "convert", "Converting", None),
        (COMPILER, "save", "Converting and Saving", None),
        (COMPILER, "one of the compiler's own", "Loading", "load"),
        (silent, "start", "load", None),
        (silent, "start", "Saving", "save"),
    ):
        assert compiler.phase_after(phase, line) == next_phase, (phase, line)


def test_of_a_failure_the_first_class_counts_and_its_first_line() -> None:
    lines = ["Error: a", "there was no memory", "and no memory again"]
    assert COMPILER.cause_of(lines) == (MEMORY, "there was no memory")
    assert COMPILER.cause_of(lines[:1]) == (OTHER, "Error: a")
    assert COMPILER.cause_of(["an Error"]) is None


def test_what_is_not_installed_is_named_with_both_ways_out() -> None:
    with pytest.raises(CompilerMissingError) as caught:
        COMPILER.require(Path("/models/it"))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("/models/it is a checkpoint and must be compiled")
    assert "(missing: no-such-package, nor-this)" in first
    assert lines[0] == "    pip install them" and lines[-1] == "    djl-trtllm compile /models/it OUT"
    replace(COMPILER, packages=("pytest",)).require(Path("/models/it"))
