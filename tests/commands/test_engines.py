"""`djl-trtllm compile`, `package` and `cache`."""

from __future__ import annotations

import json
import os
import shlex
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.commands.compile import CompileArguments, read_arguments
from djl_trtllm.config import load
from djl_trtllm.engines.cache import MANIFEST_FILE, EngineCache, Manifest
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.routing.scaling import target_concurrency
from tests.engines.helpers import build
from tests.support.s3 import Store, s3_server, variables
from tests.support.tables import by_table

WORKFLOW = """
    --checkpoint_dir=/models/trt/llama-trt-ckpt
    --gpt_attention_plugin=float16
    --gemm_plugin=float16
    --remove_input_padding=enable
    --paged_kv_cache=enable
    --tp_size=1
    --max_batch_size=256
    --max_input_len=2048
    --max_output_len=1024
    --max_num_tokens=1024
    --opt_num_tokens=1024
    --output_dir=/models/trt/llama-trt-engine
    --context_fmha=enable --use_paged_context_fmha=enable --context_fmha_fp32_acc=enable --multi_block_mode=enable
"""
"""The flags of the workflow for Llama, its variables replaced."""

SETTINGS = """
    gpt_attention_plugin=float16 gemm_plugin=float16 remove_input_padding=enable paged_kv_cache=enable
    tp_size=1 max_batch_size=256 max_input_len=2048 max_output_len=1024 max_num_tokens=1024
    opt_num_tokens=1024 context_fmha=enable use_paged_context_fmha=enable context_fmha_fp32_acc=enable
    multi_block_mode=enable
"""
runner = CliRunner()


def read(line: str) -> CompileArguments:
    return read_arguments(shlex.split(line))


def test_the_workflows_flags_are_options() -> None:
    settings = tuple(f"option.{setting}" for setting in SETTINGS.split())
    # The engine's batch is the server's too, as trtllm-build means it.
    options = load(None, {}, arguments=settings).options
    assert (options.max_num_sequences, options.max_rolling_batch_size, options.tensor_parallel_degree) == (256, 256, 1)
    expected = CompileArguments("/models/trt/llama-trt-ckpt", "/models/trt/llama-trt-engine", settings, ())
    assert read(WORKFLOW) == expected
    assert read(WORKFLOW.replace("=", " ")) == expected


@by_table("line")
def test_checkpoint_and_output_are_places_or_flags(line: str) -> None:
    arguments = read(line)
    assert (arguments.checkpoint, arguments.out) == ("in", "out")
    assert {setting.replace("enable", "true") for setting in arguments.settings} == {
        "option.tp_size=2",
        "option.fast_build=true",
    }


@pytest.mark.parametrize("word", ["enable", "disable", "true", "FALSE"])
def test_a_switch_takes_the_word_after_it_if_that_is_a_truth(word: str) -> None:
    assert read(f"--fast_build {word} in") == CompileArguments("in", None, (f"option.fast_build={word}",), ())


@by_table("line", "message")
def test_what_is_wrong_is_named(line: str, message: str) -> None:
    with pytest.raises(DjlTrtllmError, match=message):
        read(line)


def test_nothing_is_nothing_and_flags_without_effect_are_reported() -> None:
    assert read("") == CompileArguments(None, None, (), ())
    assert read("in") == CompileArguments("in", None, (), ())
    assert read("--output_dir=out") == CompileArguments(None, "out", (), ())
    notes = read("in out --workers=4 --log_level=verbose").notes
    assert [note.partition(":")[0] for note in notes] == ["--workers", "--log_level"]
    assert all("no effect" in note for note in notes)


@by_table("words", "texts")
def test_what_cannot_be_compiled_or_packed_is_said(tmp_path: Path, words: str, texts: tuple[str, ...]) -> None:
    places = {"FOLDER": str(tmp_path), "OUT": str(tmp_path / "out")}
    for name, place in places.items():
        words = words.replace(name, place)
    result = runner.invoke(app, words.split())
    assert result.exit_code == 1
    for text in texts:
        assert text in " ".join(result.stderr.split())


def test_package_writes_an_archive_and_refuses_what_serving_would_refuse(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.tar.gz"
    result = runner.invoke(app, ["package", str(model), "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    assert "1 files" in result.stderr and out.is_file() and "note:" not in result.stderr
    (model / "serving.properties").rename(model / "config.json")
    result = runner.invoke(app, ["package", str(model), "--out", str(out)])
    assert "note: there is no serving.properties" in result.stderr
    (model / "serving.properties").write_text("option.max_input_len=many\n")
    result = runner.invoke(app, ["package", str(model), "--out", str(tmp_path / "other.tar.gz")])
    assert (result.exit_code, "option.max_input_len=many" in result.stderr) == (1, True)
    assert not (tmp_path / "other.tar.gz").exists()


def packed(folder: Path, out: Path, properties: str) -> dict[str, str]:
    """The parameters for SageMaker's template of a directory with these options."""
    (folder / "serving.properties").write_text(properties)
    result = runner.invoke(app, ["package", str(folder), "--out", str(out)])
    assert result.exit_code == 0 and "note: there" not in result.stderr, result.stderr
    found: dict[str, str] = json.loads(out.with_name("model.parameters.json").read_text())["Parameters"]
    return found


def test_the_parameters_of_an_archive_are_those_of_its_directory(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.tar.gz"
    found = packed(model, out, "option.max_rolling_batch_size=256\noption.tensor_parallel_degree=4\n")
    assert (found["TargetConcurrency"], found["Accelerators"]) == ("179", "4")
    with tarfile.open(out) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    options = load(tmp_path / "unpacked", {}).options
    assert found["TargetConcurrency"] == str(target_concurrency(options.max_rolling_batch_size))
    vllm = "option.rolling_batch=vllm\n"
    assert packed(model, out, "")["TargetConcurrency"] == "22"
    assert packed(model, out, vllm)["TargetConcurrency"] == "179", "its batch is 256 by default"
    assert packed(model, out, f"{vllm}option.max_num_seqs=16\n")["TargetConcurrency"] == "11"


def test_the_version_of_an_archive_follows_from_its_files(model: Path) -> None:
    out = model / "model.tar.gz"  # neither the archive nor its parameters are packed
    versions = [packed(model, out, f"option.max_input_len={length}\n")["ModelVersion"] for length in (512, 1024, 512)]
    assert versions[0] == versions[2] != versions[1]


def test_parameters_that_somebody_has_added_stay(model: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "model.tar.gz", tmp_path / "model.parameters.json"
    file.write_text('{"Parameters": {"Image": "mine", "TargetConcurrency": "7"}}')
    found = packed(model, out, "option.tensor_parallel_degree=max\n")
    assert (found["Image"], found["TargetConcurrency"], "Accelerators" in found) == ("mine", "22", False)
    file.write_text('{"Parameters": {}, "Tags": {"team": "search"}}')
    packed(model, out, "")
    assert json.loads(file.read_text())["Tags"] == {"team": "search"}
    for wrong in ("[]", "{}", '{"Parameters": {"MaxCapacity": 4}}'):
        file.write_text(wrong)
        result = runner.invoke(app, ["package", str(model), "--out", str(out)])
        assert (result.exit_code, "model.parameters.json" in result.stderr) == (1, True)
        assert file.read_text() == wrong


def test_a_copys_gpus_are_all_its_ranks_and_an_old_number_goes_with_max(model: Path, tmp_path: Path) -> None:
    out, degrees = tmp_path / "model.tar.gz", ("tensor_parallel_degree=2", "pipeline_parallel_degree=2")
    options = "".join(f"option.{each}\n" for each in (*degrees, "context_parallel_size=4"))
    assert packed(model, out, options)["Accelerators"] == "16"
    (model / "serving.properties").write_text("option.tensor_parallel_degree=max\n")
    result = runner.invoke(app, ["package", str(model), "--out", str(out)])
    assert "Accelerators=16" in result.stderr
    assert "Accelerators" not in json.loads((tmp_path / "model.parameters.json").read_text())["Parameters"]


def test_a_checkpoint_is_compiled_as_the_flags_say_and_compared_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[Any] = []

    def compile_model(checkpoint: str, out: str, environ: Any, progress: Any, settings: Any) -> str:
        called.append((checkpoint, out, settings))
        return "the engine"

    monkeypatch.setattr("djl_trtllm.service.model.compile_model", compile_model)
    monkeypatch.setattr("djl_trtllm.service.model.compile_with_neo", lambda environ, progress: called.append("neo"))
    monkeypatch.setattr("djl_trtllm.commands.quality.quality", lambda *given: called.append(given))
    words = ["compile", "in", "out", "--max_batch_size=4", "--workers=2"]
    done = runner.invoke(app, words, env={"SM_NEO_EXECUTION_CONTEXT": "1"})
    assert (done.exit_code, called) == (0, [("in", "out", ("option.max_batch_size=4", "option.workers=2"))])
    assert "--workers: no effect" in done.stderr and "compiled the engine" in done.stderr
    runner.invoke(app, [*words, "--check", "reference"])
    assert called[2:] == [("reference", "the engine")]
    called.clear()
    assert runner.invoke(app, ["compile"], env={"SM_NEO_EXECUTION_CONTEXT": "1"}).exit_code == 0
    assert called == ["neo"]
    assert runner.invoke(app, ["compile"], env={}).exit_code == 1


# -- djl-trtllm cache --------------------------------------------------------------------------------------------------


def cache(folder: Path, *words: str) -> Any:
    return runner.invoke(app, ["cache", *words], env={"OPTION_ENGINE_CACHE_DIR": str(folder), "COLUMNS": "80"})


def test_cache_lists_verifies_and_prunes(tmp_path: Path) -> None:
    key = f"openvino-{'0123456789abcdef' * 2}"
    build(tmp_path / key)
    listed = cache(tmp_path, "ls")
    assert listed.exit_code == 0
    assert any(line.startswith(f"{key}: ") for line in listed.stdout.splitlines()), "whole, in one line of a pipe"
    assert cache(tmp_path, "verify").exit_code == 0
    (tmp_path / key / "model.bin").write_bytes(b"damaged")
    damaged = cache(tmp_path, "verify")
    assert damaged.exit_code == 1 and "model.bin" in damaged.stderr
    (tmp_path / key / MANIFEST_FILE).write_text("{")
    assert "unreadable manifest" in cache(tmp_path, "ls").stdout
    other = cache(tmp_path / key / "model.bin", "ls")
    assert other.exit_code == 1 and "option.engine_cache_dir=" in other.stderr and "is a file" in other.stderr
    kept = cache(tmp_path, "prune", "--keep", "1")
    assert "1 engines are left" in kept.stderr
    pruned = cache(tmp_path, "prune")
    assert pruned.exit_code == 0 and "0 engines are left" in pruned.stderr
    assert EngineCache(tmp_path).entries() == []


def test_cache_prunes_a_fleets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.put(f"engines/openvino-{'0123456789abcdef' * 2}.failed", b"{}")
    with s3_server(store) as endpoint:
        for name, value in variables(endpoint).items():
            monkeypatch.setenv(name, value)
        pruned = cache(tmp_path, "prune", "s3://models/engines")
        refused = cache(tmp_path, "prune", "models/engines")
    assert pruned.exit_code == 0 and "2 bytes freed" in pruned.stderr and store.objects == {}
    assert refused.exit_code == 1 and "models/engines is not an S3 address" in refused.stderr


def test_cache_shows_and_prunes_what_interrupted_processes_left(tmp_path: Path) -> None:
    left = tmp_path / ".openvino-two.1.abcd.partial"
    left.mkdir(parents=True)
    (left / "model.bin").write_bytes(bytes(2000))
    listed = cache(tmp_path, "ls")
    assert "left by interrupted processes; `prune` removes it:" in listed.stdout
    assert f"{left} (2.0 kB)" in listed.stdout
    pruned = cache(tmp_path, "prune")
    assert f"removed {left} (2.0 kB), left by an interrupted process" in pruned.stderr
    assert not left.exists()
    assert "left by" not in cache(tmp_path, "ls").stdout


def test_cache_shows_when_and_with_which_options_an_engine_was_compiled_and_keeps_the_last_used(tmp_path: Path) -> None:
    newer, older = (f"openvino-{digit * 32}" for digit in "21")
    for key, used in ((older, 1_600_000_000), (newer, 1_700_000_000)):
        build(tmp_path / key)
        manifest = Manifest.read(tmp_path / key)
        assert manifest is not None
        msgspec.structs.replace(manifest, options={"dtype": "fp16", "quantize": "none"}).write(tmp_path / key)
        for path in (*(tmp_path / key).rglob("*"), tmp_path / key):
            os.utime(path, (used, used))
    assert manifest is not None
    listed = cache(tmp_path, "ls").stdout.splitlines()
    assert listed[0].startswith(f"{tmp_path}: ")
    # What other processes left among temporary files comes after the engines.
    assert [line.partition(":")[0] for line in listed[1:3]] == [newer, older]
    assert ", last used 2023-11-1" in listed[1]
    assert listed[1].endswith(f", compiled {manifest.created}, dtype=fp16, quantize=none")
    kept = EngineCache(tmp_path).entries()[0].size / 1e9
    pruned = cache(tmp_path, "prune", "--keep", f"{kept:.12f}")
    assert f"removed {older}" in pruned.stderr and "1 engines are left" in pruned.stderr
    assert [each.key for each in EngineCache(tmp_path).entries()] == [newer]
