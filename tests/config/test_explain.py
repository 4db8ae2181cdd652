from __future__ import annotations

import io
import json

from rich.console import Console

from djl_trtllm.config import Backend, Config, load
from djl_trtllm.config.explain import as_json, render, without_effect
from djl_trtllm.config.masking import MASK, is_secret_key, masked
from djl_trtllm.config.registry import OPTIONS


def printed(config: Config, backend: Backend | None = None, *, only_set: bool = False) -> str:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(render(config, backend, only_set=only_set))
    return console.export_text()


def test_the_table_shows_value_origin_and_effect() -> None:
    text = printed(load(None, {"OPTION_MAX_NUM_TOKENS": "4096"}), Backend.OPENVINO)
    (row,) = [line for line in text.splitlines() if "option.max_num_tokens " in line]
    assert "4096 tokens" in row
    assert "environment variable OPTION_MAX_NUM_TOKENS" in row
    assert "SchedulerConfig.max_num_batched_tokens" in row


def test_the_table_has_every_option_or_only_those_set() -> None:
    config = load(None, {"OPTION_BACKEND": "openvino"})
    assert all(declared.key in printed(config) for declared in OPTIONS.values())
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


def test_secrets_are_known_by_the_end_of_a_name() -> None:
    for key in ("HF_TOKEN", "option.hf_token", "AWS_SECRET_ACCESS_KEY", "db.password", "API_KEY"):
        assert is_secret_key(key), key
    for key in ("option.max_num_tokens", "option.tokens_per_block", "option.model_id", "option.tokenizer"):
        assert not is_secret_key(key), key
    assert masked("option.model_id", "https://me:word@host/x") == f"https://{MASK}@host/x"


def test_options_without_effect_on_the_backend_are_named_with_the_reason() -> None:
    config = load(None, {"OPTION_TOKENS_PER_BLOCK": "128", "OPTION_MAX_INPUT_LEN": "8", "OPTION_MPI_MODE": "true"})
    tokens_per_block, mpi_mode = without_effect(config, Backend.OPENVINO)
    assert "option.tokens_per_block = 128 tokens" in tokens_per_block
    assert "OpenVINO's block size is 32" in tokens_per_block
    assert "option.mpi_mode = true" in mpi_mode
    (mpi_mode,) = without_effect(config, Backend.TENSORRT)
