"""The rotary options: an overlay of the checkpoint with another config.json."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from djl_trtllm.config import Config
from djl_trtllm.engines import config_overlay
from djl_trtllm.engines.config_overlay import abandoned_overlays, with_rotary_options
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
@by_table("config", "text", "changed")
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


PROGRAM = """
import os, sys
from pathlib import Path
from djl_trtllm.config import load
from djl_trtllm.engines.config_overlay import with_rotary_options
from djl_trtllm.model import inspect
layout, _ = with_rotary_options(load(None, os.environ), inspect(Path(sys.argv[1])))
print(layout.path, flush=True)
sys.stdin.read()
if sys.argv[2] == "killed":
    os._exit(1)
"""


@pytest.mark.parametrize("end", ["exit", "killed"])
def test_an_overlay_ends_with_its_process(tmp_path: Path, tiny_stories: Path, cache: Path, end: str) -> None:
    layout = checkpoint(tmp_path, tiny_stories)
    environ = {**os.environ, "OPTION_ROTARY_BASE": "5", "OPTION_ENGINE_CACHE_DIR": str(cache)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, layout.path, end],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    overlay = Path(process.stdout.readline().strip())
    assert overlay.is_dir() and list(abandoned_overlays(cache)) == []
    process.communicate(timeout=60)
    assert overlay.is_dir() is (end == "killed")
    mark = overlay.parent.with_name(f"{overlay.parent.name}.use")
    assert list(abandoned_overlays(cache)) == ([overlay.parent, mark] if end == "killed" else [])
    # The next overlay removes it.
    with_rotary_options(options("option.rotary_base=6", cache), layout)
    assert not overlay.is_dir() and not mark.exists()


def test_a_forked_process_leaves_the_overlays_of_its_parent(tmp_path: Path) -> None:
    own = tmp_path / "1-a"
    own.mkdir()
    config_overlay._remove(own, os.getpid() + 1)
    assert own.is_dir()
