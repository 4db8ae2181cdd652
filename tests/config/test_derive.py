from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .helpers import from_text


def test_max_num_tokens_widens_only_when_the_user_set_it() -> None:
    options = from_text("", {"OPTION_MAX_NUM_TOKENS": "4096"}).options
    assert (options.max_num_tokens, options.max_input_len, options.max_output_len) == (4096, 4096, 4096)
    assert options.max_rolling_batch_size == 256
    options = from_text("", {"OPTION_MAX_ROLLING_BATCH_SIZE": "8"}).options
    assert options.max_num_tokens is None
    assert (options.max_rolling_batch_size, options.max_input_len, options.max_output_len) == (8, 1024, 512)


@given(
    tokens=st.integers(1, 10**6),
    own_input=st.none() | st.integers(1, 10**5),
    own_output=st.none() | st.integers(1, 10**5),
    own_batch=st.none() | st.integers(1, 2000),
)
def test_widening_is_the_documents_formula(
    tokens: int, own_input: int | None, own_output: int | None, own_batch: int | None
) -> None:
    lines = [f"option.max_num_tokens={tokens}"]
    lines += [f"option.max_input_len={own_input}"] * (own_input is not None)
    lines += [f"option.max_output_len={own_output}"] * (own_output is not None)
    lines += [f"option.max_rolling_batch_size={own_batch}"] * (own_batch is not None)
    options = from_text("\n".join(lines)).options
    assert options.max_input_len == max(min(4096, tokens), own_input or 0)
    assert options.max_output_len == max(min(4096, tokens), own_output or 0)
    assert options.max_rolling_batch_size == max(256, own_batch or 0)


def test_widening_says_from_what_and_warns_of_a_value_it_raises() -> None:
    config = from_text("option.max_num_tokens=5000\noption.max_rolling_batch_size=8")
    assert str(config.origin("max_input_len")) == "derived from option.max_num_tokens=5000 (serving.properties:1)"
    assert config.is_set("max_rolling_batch_size")
    assert not config.is_set("max_input_len")
    (warning,) = config.warnings
    assert "option.max_rolling_batch_size=8 (serving.properties:2)" in warning


def test_an_inference_address_is_split_and_gives_way_to_a_port() -> None:
    config = from_text("", {"SERVING_INFERENCE_ADDRESS": "http://127.0.0.1:9000"})
    assert (config.options.host, config.options.port) == ("127.0.0.1", 9000)
    environ = {"SERVING_INFERENCE_ADDRESS": "http://127.0.0.1:9000", "SAGEMAKER_BIND_TO_PORT": "7"}
    assert from_text("", environ).options.port == 7


def test_the_engine_cache_follows_djls_folders() -> None:
    folders = {"DJL_CACHE_DIR": "/c", "SERVING_DOWNLOAD_DIR": "/d"}
    assert from_text("", folders).engine_cache_dir == Path("/c/djl-trtllm")
    del folders["DJL_CACHE_DIR"]
    assert from_text("", folders).engine_cache_dir == Path("/d/djl-trtllm")
    assert from_text("option.engine_cache_dir=/e", folders).engine_cache_dir == Path("/e")


def test_the_engine_cache_has_a_place_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert from_text("").engine_cache_dir == Path("/home/someone/.cache/djl-trtllm")

    def no_home(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert from_text("").engine_cache_dir.name == "djl-trtllm"
