from __future__ import annotations

from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.sources import is_secret_key, masked, shortened
from tests.support.tables import by_table


@by_table("key", "value", "shown")
def test_values_are_masked_as_far_as_they_are_secret(key: str, value: str, shown: str) -> None:
    assert masked(key, value) == shown


def test_secrets_are_known_by_the_end_of_a_name() -> None:
    secret = "HF_TOKEN option.hf_token AWS_SECRET_ACCESS_KEY db.password API_KEY apikey credential secret"
    assert [key for key in secret.split() if not is_secret_key(key)] == []
    plain = "max_num_tokens time_per_token adapter_token token_count keystore compass monkey"
    assert [key for key in plain.split() if is_secret_key(key)] == []


def test_a_long_text_is_cut_when_it_can_be_printed() -> None:
    texts = {
        "12345": "12345",
        "123456": "12...",
        "x" * 10**6: "xx...",
        "1\n2": "1\\n2",
        "\n\n\n": "\\n...",
        "\u202e": "\\u...",
    }
    assert {text: shortened(text, 5) for text in texts} == texts


def test_the_secret_options_are_known() -> None:
    secret = {declared.name for declared in OPTIONS.values() if any(map(is_secret_key, declared.spellings))}
    assert secret == {"hf_access_token", "keystore_pass", "api_key"}
