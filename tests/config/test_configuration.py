from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from djl_trtllm.config import Backend, Config, Options
from djl_trtllm.config.sources import Origin
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text


def test_replace_keeps_the_rest_and_remembers_the_origin() -> None:
    config = from_text("option.max_input_len=10")
    sized = config.replace(Origin.derived("the table of max_num_tokens"), max_num_tokens=8192)
    assert sized.options.max_num_tokens == 8192
    assert sized.options.max_input_len == 10
    assert not sized.is_set("max_num_tokens")
    served = config.replace(Origin.override("command line --port"), port=9, backend="openvino", predict_timeout=5)
    assert served.is_set("port")
    assert served.options.backend is Backend.OPENVINO
    assert isinstance(served.options.predict_timeout, float)
    assert str(served.origin("port")) == "command line --port"
    assert served.replace(Origin.derived("a rule"), port=2).is_set("port")


def test_the_engine_cache_is_where_it_was_set_or_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert from_text("").engine_cache_dir == Path("/home/someone/.cache/djl-trtllm")
    assert from_text("option.engine_cache_dir=/e").engine_cache_dir == Path("/e")
    assert from_text("option.engine_cache_dir=~/e").engine_cache_dir == Path("/home/someone/e")


def test_the_engine_cache_has_a_place_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert from_text("").engine_cache_dir == tmp_path / "djl-trtllm"


def test_a_configuration_made_by_hand_has_default_origins() -> None:
    config = Config(Options())
    assert config.origin("port") == Origin.default() and not config.is_set("port")
    assert (config.warnings, config.notes, config.overridden, config.model_dir) == ((), (), {}, None)


def test_every_wrong_value_is_reported_with_its_origin() -> None:
    with pytest.raises(ConfigError) as caught:
        from_text("").replace(Origin.override("--port"), port=-1, nothing="x", tgi_compat=3, max_input_len=True)
    assert caught.value.problems[:2] == (
        "inference_port=-1 (--port): expected a whole number, at least 0 and at most 65535",
        "nothing=x (--port): there is no such option",
    )
    assert len(caught.value.problems) == 4
