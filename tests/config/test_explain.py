from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from djl_trtllm.config import Backend, Config, load
from djl_trtllm.config.diff import diff_as_json, render_diff
from djl_trtllm.config.explain import as_json, render, without_effect
from djl_trtllm.config.masking import MASK
from djl_trtllm.config.registry import OPTIONS
from djl_trtllm.errors import ConfigError


def printed(config: Config, backend: Backend | None = None, *, only_set: bool = False) -> str:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(render(config, backend, only_set=only_set))
    return console.export_text()


def test_the_table_shows_value_origin_and_effect() -> None:
    text = printed(load(None, {"OPTION_MAX_NUM_TOKENS": "4096"}), Backend.OPENVINO)
    (row,) = [line for line in text.splitlines() if line[1:].strip().startswith("option.max_num_tokens ")]
    assert "4096 tokens" in row
    assert "environment variable OPTION_MAX_NUM_TOKENS" in row
    assert "SchedulerConfig.max_num_batched_tokens" in row


def test_the_table_has_every_option_or_only_those_set() -> None:
    config = load(None, {"OPTION_BACKEND": "openvino"})
    everything = printed(config)
    assert all(declared.key in everything for declared in OPTIONS.values())
    assert "option.dtype" not in printed(config, only_set=True)


def test_the_table_prints_brackets_as_they_are() -> None:
    assert "[red]m[/red]" in printed(load(None, {"OPTION_MODEL_ID": "[red]m[/red]"}))


def test_effects_are_named_per_backend_while_it_is_not_chosen() -> None:
    text = printed(load(None, {}))
    assert "openvino: SchedulerConfig.max_num_batched_tokens" in text


def test_json_is_plain_and_complete() -> None:
    config = load(None, {"OPTION_BACKEND": "openvino", "OPTION_DTYPE": "half", "SERVING_DOWNLOAD_DIR": "/d"})
    data = json.loads(json.dumps(as_json(config)))
    assert data["backend"] == "openvino"
    assert set(data["options"]) == set(OPTIONS)
    assert data["options"]["dtype"]["value"] == "fp16"
    assert data["options"]["dtype"]["origin"]["where"] == "OPTION_DTYPE"
    assert data["options"]["dtype"]["set"] is True
    assert data["options"]["engine_cache_dir"]["value"] == "/d/djl-trtllm"
    assert data["options"]["engine_cache_dir"]["origin"]["kind"] == "derived"
    assert data["options"]["max_input_len"]["unit"] == "tokens"


def test_what_was_beaten_is_shown() -> None:
    config = load(None, {"TENSOR_PARALLEL_DEGREE": "2", "SM_NUM_GPUS": "4"})
    assert as_json(config)["options"]["tensor_parallel_degree"]["overridden"] == [
        {"wrote": "SM_NUM_GPUS=4", "origin": "environment variable SM_NUM_GPUS"}
    ]
    assert "before SM_NUM_GPUS=4" in printed(config)


def test_secrets_are_never_shown() -> None:
    environ = {
        "HF_TOKEN": "hf_abcdefghijklmnop",
        "OPTION_HF_TOKEN": "hf_abcdefghijklmnop",
        "OPTION_MODEL_ID": "https://user:hunter2@host/model",
        "HF_MODEL_ID": "https://user:hunter2@host/other",
        "SERVING_DOWNLOAD_DIR": "/d/hf_abcdefghijklmnop",
    }
    config = load(None, environ)
    shown = printed(config) + json.dumps(as_json(config)) + "\n".join(config.warnings)
    assert "hunter2" not in shown
    assert "hf_abc" not in shown
    assert MASK in shown


def test_no_secret_of_a_hostile_configuration_is_shown(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(
        "option.env=HF_TOKEN=hunter2,PLAIN=hunter2\n"
        "option.model_id=https://me:hunter2@host/model?token=hunter2&x=1\n"
        "option.max_input_len=HF_TOKEN=hunter2\n"
        "keystore_pass=hunter2\noption.hf_token=hunter2\n"
    )
    environ = {
        "HF_TOKEN": "hunter2",
        "OPTION_ENV": "A=hunter2",
        "SERVING_KEYSTORE_PASS": "hunter2",
        "HF_MODEL_ID": "s3://me:hunt@er2hunter2@bucket/model",
    }
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, environ)
    assert "hunter2" not in str(caught.value)
    config = load(tmp_path, environ, arguments=["max_input_len=8"])
    one, other = load(tmp_path, {}, arguments=["max_input_len=8"]), config
    shown = [printed(config), json.dumps(as_json(config)), *config.warnings, *config.notes]
    shown += [json.dumps(diff_as_json(one, other)), *without_effect(config, Backend.OPENVINO)]
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(render_diff(one, other, ("a", "b")))
    shown.append(console.export_text())
    assert "hunter2" not in "\n".join(shown)
    assert config.options.env == "HF_TOKEN=hunter2,PLAIN=hunter2"


def test_options_without_effect_on_the_backend_are_named_with_the_reason() -> None:
    config = load(None, {"OPTION_TOKENS_PER_BLOCK": "128", "OPTION_MAX_INPUT_LEN": "8", "OPTION_MPI_MODE": "true"})
    tokens_per_block, mpi_mode = without_effect(config, Backend.OPENVINO)
    assert "option.tokens_per_block = 128 tokens" in tokens_per_block
    assert "OpenVINO's block size is 32" in tokens_per_block
    assert "option.mpi_mode = true" in mpi_mode
    (mpi_mode,) = without_effect(config, Backend.TENSORRT)
