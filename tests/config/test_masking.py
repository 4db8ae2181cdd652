from __future__ import annotations

import pytest

from djl_trtllm.config.masking import MASK, is_secret_key, masked, shortened
from djl_trtllm.config.options.registry import OPTIONS


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("option.env", "A=1,HF_TOKEN=x", f"A={MASK},HF_TOKEN={MASK}"),
        ("OPTION_ENV", "hunter2", MASK),
        ("option.environment", "a=b", "a=b"),
        ("option.model_id", "https://u:p@ss@host/m", f"https://{MASK}@host/m"),
        ("option.model_id", "https://me:word@host/x", f"https://{MASK}@host/x"),
        ("option.model_id", "s3://b/m?X-Amz-Signature=abc&y=1", f"s3://b/m?X-Amz-Signature={MASK}&y=1"),
        ("option.model_id", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("option.model_id", "/d/hf_abcdefghijklmnop/x", f"/d/{MASK}/x"),
        ("option.model_id", "hf_short", "hf_short"),
        ("", "API_KEY='a b', x=1", f"API_KEY={MASK}, x=1"),
        ("", 'password = "a b"; x', f"password = {MASK}; x"),
        ("", "HF_TOKEN=a\ntokens=3", f"HF_TOKEN={MASK}\ntokens=3"),
        ("option.max_num_tokens", "4096", "4096"),
        ("keystore_pass", "x", "********"),
    ],
)
def test_values_are_masked_as_far_as_they_are_secret(key: str, value: str, shown: str) -> None:
    assert masked(key, value) == shown


def test_secrets_are_known_by_the_end_of_a_name() -> None:
    secret = (
        "HF_TOKEN",
        "option.hf_token",
        "AWS_SECRET_ACCESS_KEY",
        "db.password",
        "API_KEY",
        "apikey",
        "credential",
        "secret",
    )
    assert [key for key in secret if not is_secret_key(key)] == []
    plain = ("max_num_tokens", "time_per_token", "adapter_token", "token_count", "keystore", "compass", "monkey")
    assert [key for key in plain if is_secret_key(key)] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("12345", "12345"),
        ("123456", "12..."),
        ("x" * 1_000_000, "xx..."),
        ("1\n2", "1\\n2"),
        ("\n\n\n", "\\n..."),
        ("\u202e", "\\u..."),
    ],
)
def test_a_long_text_is_cut_when_it_can_be_printed(text: str, shown: str) -> None:
    assert shortened(text, 5) == shown


def test_the_secret_options_are_known() -> None:
    secret = {declared.name for declared in OPTIONS.values() if any(map(is_secret_key, declared.spellings))}
    assert secret == {"hf_access_token", "keystore_pass", "api_key"}
