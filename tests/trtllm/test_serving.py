"""Models compiled ahead of time, compiled on the first start and run as they are; and what does not fit into them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from djl_trtllm.model import Tokenizer
from tests.support.server import Server
from tests.trtllm.conftest import START_SECONDS, Installation, MakeModel, ask, run_cli, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]


@pytest.fixture
def _engine_backend(installation: Installation) -> None:
    if not installation.has("tensorrt"):
        pytest.skip(f"TensorRT-LLM {installation.version} has no engine backend")


def test_compile_writes_an_engine_directory(installation: Installation, compiled: Path) -> None:
    files = {path.name for path in compiled.iterdir()}
    assert {"config.json", "rank0.engine", "manifest.json", "serving.properties", "tokenizer.json"} <= files
    config = json.loads((compiled / "config.json").read_text())
    assert config["version"] == installation.version
    assert config["pretrained_config"]["mapping"]["world_size"] == 1
    build = config["build_config"]
    assert (build["max_batch_size"], build["max_seq_len"]) == (2, 1536)
    assert build["plugin_config"]["tokens_per_block"] == 64


@pytest.mark.usefixtures("_engine_backend")
def test_the_first_start_compiles_and_the_second_finds_the_engine(
    installation: Installation, make_model: MakeModel, tmp_path: Path
) -> None:
    own_cache = replace(installation, environ={**installation.environ, "DJL_CACHE_DIR": str(tmp_path / "cache")})
    model = make_model("tensorrt")
    with serving(own_cache, model) as first:
        answer = ask(first, "once upon a time", max_new_tokens=16).json()
    (engine,) = (tmp_path / "cache").rglob("rank0.engine")
    written = engine.stat().st_mtime_ns
    with serving(own_cache, model) as second:
        assert ask(second, "once upon a time", max_new_tokens=16).json() == answer
    assert list((tmp_path / "cache").rglob("rank0.engine")) == [engine]
    assert engine.stat().st_mtime_ns == written


@pytest.mark.usefixtures("_engine_backend")
def test_weights_quantised_without_calibration_are_served(
    installation: Installation, make_model: MakeModel, tmp_path: Path
) -> None:
    out = tmp_path / "int8"
    result = run_cli(installation, "compile", str(make_model("tensorrt", quantize="int8")), str(out))
    assert result.returncode == 0, result.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["pretrained_config"]["quantization"]["quant_algo"] == "W8A16"
    with serving(installation, out) as server:
        assert ask(server, "once upon a time", max_new_tokens=16).status_code == 200


# -- the PyTorch backend -----------------------------------------------------------------------------------------------
def test_a_checkpoint_is_served_without_compiling(
    installation: Installation, make_model: MakeModel, tmp_path: Path
) -> None:
    own_cache = replace(installation, environ={**installation.environ, "DJL_CACHE_DIR": str(tmp_path / "cache")})
    with serving(own_cache, make_model("pytorch")) as server:
        assert ask(server, "once upon a time", max_new_tokens=16).status_code == 200
    assert not list((tmp_path / "cache").rglob("*.engine"))


def test_compile_says_that_there_is_nothing_to_compile(
    installation: Installation, make_model: MakeModel, tmp_path: Path
) -> None:
    result = run_cli(installation, "compile", str(make_model("pytorch")), str(tmp_path / "out"))
    assert result.returncode == 1
    assert "pytorch" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_runtime_options_are_taken(installation: Installation, make_model: MakeModel) -> None:
    """Arguments that the real constructor does not have are an error of its own."""
    options = {
        "enable_chunked_context": "true",
        "max_num_tokens": 1024,
        "kv_cache_free_gpu_mem_fraction": 0.3,
        "batch_scheduler_policy": "guaranteed_no_evict",
        "enable_kv_cache_reuse": "true",
        "disable_cuda_graph": "true",
        "enable_iter_perf_stats": "true",
        "stream_interval": 2,
    }
    with serving(installation, make_model("pytorch", **options)) as server:
        assert ask(server, "once upon a time", max_new_tokens=16).status_code == 200


# -- limits ------------------------------------------------------------------------------------------------------------

WORD = " wolf"


def prompt_of(tokenizer: Tokenizer, tokens: int) -> str:
    """A prompt of exactly this number of tokens."""
    text = "the"
    while len(tokenizer.encode(text)) < tokens:
        text += WORD
    assert len(tokenizer.encode(text)) == tokens
    return text


def test_the_longest_prompt_is_answered_and_a_longer_one_refused(server: Server, tokenizer: Tokenizer) -> None:
    assert ask(server, prompt_of(tokenizer, 512), max_new_tokens=4).status_code == 200
    refused = ask(server, prompt_of(tokenizer, 513), max_new_tokens=4)
    assert refused.status_code == 424
    assert "513 tokens, and max_input_len is 512" in refused.json()["error"]
    assert ask(server, "the wolf", max_new_tokens=4).status_code == 200


def test_the_longest_sequence_is_answered_and_a_longer_one_refused(server: Server, tokenizer: Tokenizer) -> None:
    room = 1536 - 512
    answer = ask(server, prompt_of(tokenizer, 512), max_new_tokens=room, ignore_eos_token=True, details=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["details"]["generated_tokens"] == room
    refused = ask(server, prompt_of(tokenizer, 512), max_new_tokens=room + 1)
    assert refused.status_code == 424
    assert "1025 new tokens, and max_output_len is 1024" in refused.json()["error"]


def test_more_sequences_than_the_engine_was_compiled_for_are_lowered_to_its_own(
    installation: Installation, compiled: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(compiled, engine)
    properties = engine / "serving.properties"
    properties.write_text(properties.read_text() + "option.max_rolling_batch_size=4\noption.max_num_sequences=4\n")
    result = run_cli(installation, "config", str(engine))
    assert (result.returncode, "max_num_sequences" in result.stdout + result.stderr) == (0, True)
    with serving(installation, engine) as server:
        assert ask(server, "the wolf", max_new_tokens=4).status_code == 200


def test_fewer_sequences_than_the_engine_was_compiled_for_are_run(
    installation: Installation, compiled: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(compiled, engine)
    lines = [
        line
        for line in (engine / "serving.properties").read_text().splitlines()
        if not line.startswith(("option.max_rolling_batch_size", "option.max_num_sequences"))
    ]
    (engine / "serving.properties").write_text("\n".join([*lines, "option.max_rolling_batch_size=1", ""]))
    with serving(installation, engine) as server:
        assert ask(server, "the wolf", max_new_tokens=4).status_code == 200


def test_a_checkpoint_with_chunks_takes_prompts_beyond_an_iteration(
    installation: Installation, make_model: MakeModel, tokenizer: Tokenizer
) -> None:
    """PyTorch without chunked prefill refuses prompts above max_num_tokens; with it they are split."""
    model = make_model("pytorch", max_num_tokens=256, max_input_len=512, enable_chunked_context="true")
    with serving(installation, model) as server:
        answer = ask(server, prompt_of(tokenizer, 500), max_new_tokens=4)
        assert answer.status_code == 200, answer.text
