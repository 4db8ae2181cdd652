"""What the configuration of a fetched repository may set is a list, in code and in the documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from djl_trtllm.config import load
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.resolve import MAY_SET, WITHIN, listed
from tests.support.tables import by_table

PAGE = Path(__file__).parents[2] / "docs" / "fetched-models.md"

OF_THE_OPERATOR = {
    "hf_access_token", "engine_cache_dir", "engine_cache_max_gb", "engine_cache", "engine_cache_wait",
    "input_timing_cache", "output_timing_cache", "visualize_network", "calib_dataset", "lora_dir", "sessions_path",
    "enable_stateful_sessions", "sessions_expiration", "max_sessions", "executor_memory_limit",
    "executor_max_requests", "chat_template_timeout", "workspace",
    "extra_llm_api_options", "extra_engine_args", "speculative_config", "compilation_config", "hf_overrides",
    "kv_transfer_config", "limit_mm_per_prompt", "allowed_media_domains", "stored_responses_timeout",
    "stored_responses_memory",
}  # fmt: skip
"""Options of a model that are no business of its repository: files, addresses, secrets and limits of this machine."""


def test_every_option_of_a_model_is_on_one_of_the_lists() -> None:
    of_models = {name for name, each in OPTIONS.items() if each.option.scope is Scope.MODEL and not each.option.legacy}
    assert of_models == MAY_SET | WITHIN | OF_THE_OPERATOR
    assert not (MAY_SET | WITHIN) & OF_THE_OPERATOR


def test_no_listed_option_is_the_servers_or_a_permission_and_none_is_a_path() -> None:
    listed_options = [OPTIONS[name] for name in MAY_SET]
    assert {each.option.scope for each in listed_options} == {Scope.MODEL}
    assert [each.name for each in listed_options if each.type.base is Path] == []


def test_the_page_has_the_list() -> None:
    assert re.findall(r"^- `([\w.]+)`$", PAGE.read_text(), re.MULTILINE) == listed()


@by_table("line")
def test_what_is_not_listed_is_ignored_by_name(tmp_path: Path, line: str) -> None:
    (tmp_path / "serving.properties").write_text(f"{line}\noption.max_input_len=77\n")
    config = load(tmp_path, {}, fetched="acme/story")
    key = line.partition("=")[0]
    (warning,) = [warning for warning in config.warnings if "was fetched" in warning]
    assert warning.startswith(f"{line} (")
    assert "acme/story was fetched" in warning and "docs/fetched-models.md" in warning
    name = next(name for name, each in OPTIONS.items() if key in each.spellings)
    assert config.options.max_input_len == 77
    assert getattr(config.options, name) == getattr(load(None, {}).options, name)


def test_what_may_be_an_argument_of_the_engine_is_ignored_by_name(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.rolling_batch=vllm\noption.worker_cls=theirs.Own\n")
    config = load(tmp_path, {}, fetched="acme/story")
    (warning,) = config.warnings
    assert "acme/story was fetched" in warning and "OPTION_WORKER_CLS" in warning
    assert config.engine_settings == ()
    assert [each.key for each in load(tmp_path, {}).engine_settings] == ["option.worker_cls"]


@pytest.mark.parametrize("line", ["option.model_id=weights", "option.model_id=acme/other", "option.dtype=fp16"])
def test_what_is_listed_counts(tmp_path: Path, line: str) -> None:
    (tmp_path / "serving.properties").write_text(f"{line}\n")
    config = load(tmp_path, {}, fetched="acme/story")
    assert not any("was fetched" in warning for warning in config.warnings)
    assert config.user_set


def test_the_operator_may_set_everything(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.engine_cache_dir=/etc\n")
    config = load(tmp_path, {"OPTION_ENGINE_CACHE_DIR": str(tmp_path)}, fetched="acme/story")
    assert config.options.engine_cache_dir == tmp_path


def test_the_configuration_of_a_model_that_a_fetched_one_names_is_bounded_too(tmp_path: Path) -> None:
    """`load` reads a second source, the repository that `option.model_id` names; it is no more trusted."""
    engine = tmp_path / "engine" / "tensorrt_llm"
    engine.mkdir(parents=True)
    (tmp_path / "serving.properties").write_text("option.model_id=engine\n")
    lora = 'parameters { key: "lora_prefetch_dir" value: { string_value: "/etc" } }'
    stolen = 'parameters { key: "tokenizer_dir" value: { string_value: "/etc/secrets" } }'
    (engine / "config.pbtxt").write_text(f"max_batch_size: 7\n{stolen}\n{lora}\n")
    config = load(tmp_path, {}, fetched="acme/story")
    assert (config.options.max_rolling_batch_size, config.options.tokenizer) == (7, None)
    (warning,) = [warning for warning in config.warnings if "was fetched" in warning]
    assert warning.startswith("tokenizer_dir=/etc/secrets (") and "acme/story was fetched" in warning
    assert load(tmp_path, {}).options.tokenizer == "/etc/secrets"
