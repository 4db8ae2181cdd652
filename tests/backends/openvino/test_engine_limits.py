"""What the manifest of an engine says it was compiled for, as defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from djl_trtllm.backends.openvino.engine_limits import built_limits
from djl_trtllm.config import load
from djl_trtllm.errors import EngineMismatchError
from tests.engines.helpers import configured

LIMITS = {"max_rolling_batch_size": 8, "max_input_len": 511, "max_output_len": 511, "max_seq_len": 512}


def manifest(path: Path, limits: object = LIMITS) -> Path:
    head = {"format": 1, "backend": "openvino", "checkpoint": "", "versions": {}, "platform": "", "created": ""}
    content = {**head, "options": {}, "files": {}, **({} if limits is None else {"limits": limits})}
    (path / "manifest.json").write_text(json.dumps(content))
    return path


def defaults(path: Path, **options: object) -> dict[str, object]:
    built = built_limits(configured(**options), manifest(path))
    assert built is not None and built.where == f"limits in {path / 'manifest.json'}" and not built.bounds
    return dict(built.defaults)


def test_the_limits_are_those_of_the_manifest(tmp_path: Path) -> None:
    assert defaults(tmp_path) == LIMITS


@pytest.mark.parametrize("limits", [None, {}])
def test_a_manifest_without_limits_says_nothing(tmp_path: Path, limits: object) -> None:
    assert built_limits(configured(), manifest(tmp_path, limits)) is None
    (tmp_path / "manifest.json").unlink()
    assert built_limits(configured(), tmp_path) is None


def test_a_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineMismatchError):
        built_limits(configured(), manifest(tmp_path, "many"))


def test_what_the_user_set_is_left_out(tmp_path: Path) -> None:
    kept = defaults(tmp_path, max_rolling_batch_size=64, max_input_len=100)
    assert kept == {"max_output_len": 511, "max_seq_len": 512}


def test_lengths_that_the_user_raises_are_not_cut_by_those_of_the_manifest(tmp_path: Path) -> None:
    assert defaults(tmp_path, max_input_len=2000) == {"max_rolling_batch_size": 8, "max_output_len": 511}
    assert defaults(tmp_path, max_output_len=512) == {"max_rolling_batch_size": 8, "max_input_len": 511}
    assert defaults(tmp_path, max_seq_len=2000) == {"max_rolling_batch_size": 8}
    assert defaults(tmp_path, max_seq_len=100) == {name: LIMITS[name] for name in LIMITS if name != "max_seq_len"}
    assert "max_seq_len" not in defaults(tmp_path, max_seq_len=2000, max_input_len=2000)


def test_presets_of_another_server_give_way_to_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model_metadata:\n  engine_repository: acme/engine\n")
    config = load(tmp_path, {})
    assert config.options.max_rolling_batch_size == 128
    built = built_limits(config, manifest(tmp_path))
    assert built is not None and built.defaults == {**LIMITS, "max_num_sequences": 8}


def test_what_another_option_widens_counts_where_it_is_wider(tmp_path: Path) -> None:
    assert defaults(tmp_path, max_num_tokens=4096) == {}
    assert "max_rolling_batch_size" not in defaults(tmp_path, max_batch_size=64)
    assert defaults(tmp_path, max_num_sequences=4)["max_rolling_batch_size"] == 4
    assert defaults(tmp_path, max_num_sequences=64)["max_rolling_batch_size"] == 8
    assert defaults(tmp_path, max_num_tokens=256) == {
        "max_input_len": 511,
        "max_output_len": 511,
        "max_seq_len": 512,
    }
