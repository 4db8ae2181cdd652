"""Options that a program gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm import KvCacheConfig
from djl_trtllm.errors import ConfigError
from djl_trtllm.offline.options import open_offline_model
from tests.offline.helpers import Make, stories
from tests.support.models import scripted_model


def test_keyword_options_win_over_the_models_file_in_any_spelling(make: Make) -> None:
    llm = make(file={"option.max_input_len": 5}, max_input_len=500, tensor_parallel_size=1, dtype=None)
    assert llm.generate(stories(1))[0].error is None


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_degree", 4),
        ({"batch_scheduler_policy": "max_utilization"}, "batch_scheduler_policy", "max_utilization"),
        ({"capacity_scheduler_policy": "MAX_UTILIZATION"}, "batch_scheduler_policy", "max_utilization"),
        (
            {"context_chunking_policy": "equal_progress", "enable_chunked_prefill": True},
            "context_chunking_policy",
            "equal_progress",
        ),
        ({"free_gpu_memory_fraction": 0.95}, "kv_cache_free_gpu_mem_fraction", 0.95),
        ({"max_tokens_in_paged_kv_cache": 65536}, "max_tokens_in_paged_kv_cache", 65536),
        ({"max_tokens": 65536}, "max_tokens_in_paged_kv_cache", 65536),
        ({"max_attention_window": [4096, 8192]}, "max_attention_window", (4096, 8192)),
        ({"retry_threshold": 5}, "retry_threshold", 5),
        ({"kv_cache_config": KvCacheConfig(free_gpu_memory_fraction=0.5)}, "kv_cache_free_gpu_mem_fraction", 0.5),
        ({"kv_cache_config": {"max_tokens": 4096, "dtype": None}}, "max_tokens_in_paged_kv_cache", 4096),
    ],
)
def test_the_documents_options_have_their_names(
    tmp_path: Path, options: dict[str, object], name: str, value: object
) -> None:
    config = open_offline_model(scripted_model(tmp_path / "model"), options).config
    assert getattr(config.options, name) == value


@pytest.mark.parametrize(("options", "allowed"), [({}, False), ({"trust_remote_code": True}, True)])
def test_a_fetched_model_does_not_allow_its_own_code_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], allowed: bool
) -> None:
    fetched = scripted_model(tmp_path / "model", **{"option.trust_remote_code": True})
    ran = tmp_path / "ran"
    (fetched / "model.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setattr("djl_trtllm.service.model.fetch_model", lambda text, config, revision, **kinds: fetched)
    prepared = open_offline_model("acme/story", options)
    prepared.texts()
    assert prepared.config.options.trust_remote_code is allowed
    assert ran.exists() is allowed


def test_what_is_no_option_is_an_error_with_a_suggestion(make: Make) -> None:
    with pytest.raises(ConfigError) as refused:
        make(max_input_length=5, speculative_config={"max_draft_len": 5}, zzz=1)
    length, nested, unknown = refused.value.problems
    assert "did you mean max_input_len?" in length
    assert "speculative_config is not one of TensorRT-LLM's configuration objects" in nested
    assert "docs/options.md" in unknown


def test_a_wrong_value_is_an_error(make: Make) -> None:
    with pytest.raises(ConfigError, match="max_input_len=many"):
        make(max_input_len="many")
