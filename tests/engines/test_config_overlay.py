"""The rotary options: an overlay of the checkpoint with another config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from djl_trtllm.config import Config
from djl_trtllm.engines.config_overlay import with_rotary_options
from djl_trtllm.engines.plan import checkpoint_identity
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, inspect
from tests.config.helpers import from_text
from tests.support.tables import by_table

LINEAR = "option.rotary_scaling_type=linear\noption.rotary_scaling_factor=2\n"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def checkpoint(tmp_path: Path, tiny_stories: Path, **config: object) -> Layout:
    """The bundled model's files, with changes to its config.json; None removes a key."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(tiny_stories / name)
    if "architecture" in config:  # of TensorRT-LLM
        (directory / "model.safetensors").rename(directory / "rank0.safetensors")
    content = json.loads((tiny_stories / "config.json").read_text()) | config
    content = {name: value for name, value in content.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(content))
    return inspect(directory)


def options(text: str, cache: Path) -> Config:
    return from_text(f"{text}\noption.engine_cache_dir={cache}")


def test_without_an_effect_there_is_no_overlay(tmp_path: Path, tiny_stories: Path, cache: Path) -> None:
    layout, engine = checkpoint(tmp_path, tiny_stories), inspect(tiny_stories / "engine")
    for text in ("", "option.rotary_base=10000", "option.rotary_scaling_factor=2"):
        assert with_rotary_options(options(text, cache), layout)[0] is layout
    same, (line,) = with_rotary_options(options("option.rotary_base=5", cache), engine)
    assert same is engine
    assert line.startswith("option.rotary_base=5 (serving.properties:1) has no effect: the model is a compiled engine")
    assert not cache.exists()


def test_an_overlay_is_the_checkpoint_with_another_config(
    tmp_path: Path, tiny_stories: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    layout = checkpoint(tmp_path, tiny_stories)
    before = (layout.path / "config.json").read_text()
    config = options("option.rotary_base=20000", cache)
    found, told = with_rotary_options(config, layout)
    assert told == () and found.kind is layout.kind
    assert f"the engine reads {layout.path} as {found.path}, whose config.json" in caplog.text
    assert found.path.name == "checkpoint" and found.path.parent.parent == cache / "overlays"
    assert sorted(path.name for path in found.path.iterdir()) == sorted(path.name for path in layout.path.iterdir())
    assert (found.path / "model.safetensors").samefile(tiny_stories / "model.safetensors")
    assert json.loads((found.path / "config.json").read_text()) == json.loads(before) | {"rope_theta": 20000.0}
    assert (layout.path / "config.json").read_text() == before
    assert checkpoint_identity(found.path) != checkpoint_identity(layout.path)
    assert with_rotary_options(config, layout)[0].path == found.path


# The last is PretrainedConfig.to_dict of LLaMAConfig, tensorrt_llm/models/llama/config.py, 1.2.
@by_table("config", "text", "changed", apart=True)
def test_each_family_has_its_own_keys(
    tmp_path: Path, tiny_stories: Path, cache: Path, config: dict[str, object], text: str, changed: dict[str, object]
) -> None:
    layout = checkpoint(tmp_path, tiny_stories, **config)
    found, told = with_rotary_options(options(text, cache), layout)
    assert told == ()
    assert found.config == (layout.config or {}) | changed


def test_what_cannot_have_an_effect_is_reported(tmp_path: Path, tiny_stories: Path, cache: Path) -> None:
    layout = checkpoint(tmp_path, tiny_stories, model_type="gpt2", rope_theta=None)
    same, told = with_rotary_options(options(f"option.rotary_base=5\noption.rotary_dim=6\n{LINEAR}", cache), layout)
    assert same is layout
    assert [line.split(" has no effect: ")[1] for line in told] == [
        f"gpt2 has no {key} to change" for key in ("rope_theta", "rotary_dim", "rope_scaling")
    ]
    assert told[0].startswith("option.rotary_base=5 (serving.properties:1)")
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    layout = checkpoint(tmp_path / "other", tiny_stories)
    with pytest.raises(EngineError, match=r"the rotary options need a changed copy of .*set option\.engine_cache_dir"):
        with_rotary_options(options("option.rotary_base=5", tmp_path / "file"), layout)


def test_an_engine_beside_the_checkpoint_that_says_not_how_it_was_compiled_is_not_used(
    tmp_path: Path, tiny_stories: Path, cache: Path
) -> None:
    path = checkpoint(tmp_path, tiny_stories).path
    shutil.copytree(tiny_stories / "engine", path / "engine")
    asked = options("option.rotary_base=5", cache)
    layout, told = with_rotary_options(asked, inspect(path))
    assert layout.bundled_engine is not None and told == ()  # its manifest is compared
    (path / "engine" / "manifest.json").unlink()
    layout, (line,) = with_rotary_options(asked, inspect(path))
    assert layout.bundled_engine is None
    assert line.startswith("the engine folder beside the checkpoint is not used: it has no manifest.json")
    assert line.endswith("option.rotary_base=5 (serving.properties:1)")
    assert inspect(path).bundled_engine is not None


def test_an_overlay_follows_the_files_of_its_checkpoint(tmp_path: Path, tiny_stories: Path, cache: Path) -> None:
    layout, config = checkpoint(tmp_path, tiny_stories), options("option.rotary_base=5", cache)
    (layout.path / "merges.txt").touch()
    overlay = with_rotary_options(config, layout)[0].path
    (layout.path / "merges.txt").rename(layout.path / "vocab.txt")
    assert with_rotary_options(config, layout)[0].path == overlay
    assert sorted(path.name for path in overlay.iterdir()) == sorted(path.name for path in layout.path.iterdir())
    assert [path for path in overlay.iterdir() if not path.is_symlink()] == [overlay / "config.json"]
    assert list(overlay.parent.iterdir()) == [overlay]
    assert with_rotary_options(options("option.rotary_base=6", cache), layout)[0].path != overlay
