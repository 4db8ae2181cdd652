from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.config import Layer, Origin, Setting, Source, resolve
from djl_trtllm.config.derive import Draft
from djl_trtllm.config.masking import MASK
from tests.config.helpers import from_text, problems_of


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


@pytest.mark.parametrize("tokens", ["", "option.max_num_tokens=5000\n"])
def test_max_batch_size_is_the_batch_in_engine_and_server(tokens: str) -> None:
    config = from_text(f"{tokens}option.max_batch_size=64")
    assert (config.options.max_num_sequences, config.options.max_rolling_batch_size) == (64, 64)
    cause = f"option.max_batch_size=64 (serving.properties:{2 if tokens else 1})"
    assert str(config.origin("max_rolling_batch_size")) == f"derived from {cause}"
    assert from_text("", {"OPTION_MAX_BATCH_SIZE": "64"}).options.max_rolling_batch_size == 64
    assert from_text("option.max_batch_size=64\noption.max_rolling_batch_size=16").options.max_rolling_batch_size == 16
    assert from_text("option.max_num_sequences=64").options.max_rolling_batch_size == 32


def test_widening_says_from_what_and_warns_of_a_value_it_raises() -> None:
    config = from_text("option.max_num_tokens=5000\noption.max_rolling_batch_size=8")
    assert str(config.origin("max_input_len")) == "derived from option.max_num_tokens=5000 (serving.properties:1)"
    assert config.is_set("max_rolling_batch_size")
    assert not config.is_set("max_input_len")
    (warning,) = config.warnings
    assert "option.max_rolling_batch_size=8 (serving.properties:2)" in warning


def test_a_value_at_the_limit_is_left_alone() -> None:
    config = from_text("option.max_num_tokens=5000\noption.max_input_len=4096\noption.max_rolling_batch_size=256")
    assert config.warnings == ()
    assert str(config.origin("max_input_len")) == "serving.properties:2"
    assert str(config.origin("max_rolling_batch_size")) == "serving.properties:3"
    assert str(config.origin("max_output_len")) == "derived from option.max_num_tokens=5000 (serving.properties:1)"


def test_a_value_that_is_raised_is_reported_with_both() -> None:
    config = from_text("option.max_num_tokens=5000\noption.max_rolling_batch_size=8")
    assert config.warnings == (
        "option.max_rolling_batch_size=8 (serving.properties:2) is raised to 256, because "
        "option.max_num_tokens=5000 (serving.properties:1) sets it to max(256, your value); to keep a smaller value, "
        "leave option.max_num_tokens out",
    )
    assert str(config.origin("max_rolling_batch_size")) == (
        "derived from option.max_num_tokens=5000 (serving.properties:1), which raises 8 (serving.properties:2)"
    )


def test_a_value_of_another_servers_file_widens_nothing() -> None:
    setting = Setting("option.max_num_tokens", "5000", Origin.file("config.yaml", 1), "max_num_tokens", alone=True)
    options = resolve([Source(Layer.FOREIGN, (setting,))]).options
    assert (options.max_num_tokens, options.max_input_len, options.max_rolling_batch_size) == (5000, 1024, 32)


def test_a_field_is_set_where_the_user_gave_it_a_value_that_is_one() -> None:
    draft = Draft()
    draft.chosen["port"] = Setting("port", "x", Origin.file("f", 1), "port")
    assert not draft.is_set("port")
    draft.values["port"] = 1
    assert draft.is_set("port")
    draft.derive("host", "h", "a rule")
    assert not draft.is_set("host")
    assert (draft.values["host"], draft.origins["host"]) == ("h", Origin.derived("a rule"))


def test_an_inference_address_is_split_into_host_and_port() -> None:
    for address, host, port in (
        ("http://127.0.0.1:9000", "127.0.0.1", 9000),
        ("http://0.0.0.0:9000/", "0.0.0.0", 9000),
        ("http://example", "example", 80),
        ("http://[::1]:9000", "::1", 9000),
    ):
        config = from_text(f"inference_address={address}")
        assert (config.options.host, config.options.port) == (host, port)
        rule = f"derived from inference_address={address} (serving.properties:1)"
        assert str(config.origin("host")) == str(config.origin("port")) == rule


def test_host_and_port_of_their_own_count_before_the_address() -> None:
    config = from_text("inference_address=http://127.0.0.1:9000\ninference_host=localhost\ninference_port=7")
    assert (config.options.host, config.options.port) == ("localhost", 7)
    assert str(config.origin("host")) == "serving.properties:2"


def test_an_address_of_another_form_is_refused() -> None:
    wrong = (
        "0.0.0.0:8080",
        "ftp://host:1",
        "http://:8080",
        "http://user@host:1",
        "http://host:1/path",
        "http://host:1?a=b",
        "http://host:99999",
        "http://[::1",
    )
    for address in wrong:
        told = f"inference_address={address.replace('user', MASK)} (serving.properties:1): expected http://HOST:PORT"
        assert problems_of(f"inference_address={address}") == (told,)
    (problem,) = problems_of("inference_address=https://host:1")
    assert problem.endswith("http://HOST:PORT; for TLS set certificate_file and private_key_file")


def test_with_a_certificate_an_address_is_one_of_https() -> None:
    environ = {"SERVING_CERTIFICATE_FILE": "/c.pem", "SERVING_PRIVATE_KEY_FILE": "/k.pem"}
    config = from_text("inference_address=https://host", environ)
    assert (config.options.host, config.options.port) == ("host", 443)
    (problem,) = problems_of("inference_address=http://host:1", environ)
    assert problem.endswith("expected https://HOST:PORT, because certificate_file and private_key_file are set")


def test_the_management_address_is_split_too() -> None:
    config = from_text("management_address=http://0.0.0.0:8081")
    assert (config.options.management_host, config.options.management_port) == ("0.0.0.0", 8081)
    assert config.options.port == 8080


def test_a_management_address_that_is_that_of_the_requests_is_no_port_of_its_own() -> None:
    both = "inference_address=http://127.0.0.1:8080\nmanagement_address=http://127.0.0.1:8080"
    assert from_text(both).options.management_port == 0
    assert from_text("management_address=http://0.0.0.0:8080").options.management_port == 0
    assert from_text("management_address=http://127.0.0.1:8080").options.management_port == 8080
    assert from_text(both, {"SERVING_MANAGEMENT_PORT": "8080"}).options.management_port == 8080


def test_an_inference_address_is_split_and_gives_way_to_a_port() -> None:
    config = from_text("", {"SERVING_INFERENCE_ADDRESS": "http://127.0.0.1:9000"})
    assert (config.options.host, config.options.port) == ("127.0.0.1", 9000)
    environ = {"SERVING_INFERENCE_ADDRESS": "http://127.0.0.1:9000", "SAGEMAKER_BIND_TO_PORT": "7"}
    assert from_text("", environ).options.port == 7


def test_the_engine_cache_follows_djls_folders() -> None:
    folders = {"DJL_CACHE_DIR": "/c", "SERVING_DOWNLOAD_DIR": "/d"}
    config = from_text("", folders)
    assert config.options.engine_cache_dir == Path("/c/djl-trtllm")
    assert str(config.origin("engine_cache_dir")) == "derived from DJL_CACHE_DIR=/c (environment)"
    del folders["DJL_CACHE_DIR"]
    config = from_text("", folders)
    assert config.options.engine_cache_dir == Path("/d/djl-trtllm")
    assert str(config.origin("engine_cache_dir")) == "derived from SERVING_DOWNLOAD_DIR=/d (environment)"
    config = from_text("option.engine_cache_dir=/e", folders)
    assert config.options.engine_cache_dir == Path("/e") and config.is_set("engine_cache_dir")
    assert from_text("").options.engine_cache_dir is None
