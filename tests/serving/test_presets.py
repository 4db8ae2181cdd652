"""The presets resolve without a word, say only what has an effect, and agree with the tables of docs/models.md."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from djl_trtllm.backends.base import effects_on
from djl_trtllm.backends.planning import deviations, plan_engine
from djl_trtllm.config import Backend, Config, load
from djl_trtllm.config.options import find
from djl_trtllm.config.rules import check_model
from djl_trtllm.engines.hardware import Gpu, Hardware
from djl_trtllm.model import Layout, inspect

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "serving" / "models"
PAGE = ROOT / "docs" / "models.md"

DOCUMENT_FAMILIES = (
    "LLaMA", "Falcon", "InternLM", "Baichuan", "ChatGLM", "GPT-J", "Mistral", "Mixtral", "Qwen", "GPT2", "SantaCoder",
    "StarCoder",
)  # fmt: skip
"""The families of lmi-trt-llm.md that are compiled at load; the last three are one line there."""

PRESETS = sorted(
    file.parent.name for file in MODELS.glob("*/serving.properties") if len(list(file.parent.iterdir())) == 1
)
"""Folders that hold a serving.properties and nothing else; the bundled model holds more."""


@dataclass(frozen=True)
class Row:
    """A line of the tables: what the page claims about one preset."""

    family: str
    model_type: str
    preset: str
    engine: bool
    pytorch: bool
    """In TensorRT-LLM 1.2 or 1.3."""


def _rows() -> list[Row]:
    pattern = re.compile(
        r"\| (.+?) \| (\w+) \| `\w+` \| \[(.+?)\]\(\.\./serving/models/(.+?)/serving\.properties\) \| (.+) \|"
    )
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if (found := pattern.fullmatch(line)) is not None:
            family, model_type, text, folder, backends = found.groups()
            assert text == folder, f"{PAGE.name}: the link [{text}] leads to {folder}"
            engine, *pytorch = (cell.startswith("yes") for cell in backends.split(" | "))
            rows.append(Row(family, model_type, folder, engine, any(pytorch)))
    return rows


ROWS = {row.preset: row for row in _rows()}
VERSIONS = {
    Backend.AUTO: ("1.0.0", "1.2.1", "1.3.0"),
    Backend.TENSORRT: ("1.0.0", "1.2.1"),
    Backend.PYTORCH: ("1.2.1", "1.3.0"),
}
"""The version of TensorRT-LLM on which a preset must have a plan, by the backend it asks for."""


@pytest.fixture(params=PRESETS)
def preset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(preset: str) -> Config:
    return load(MODELS / preset, {})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_stories: Path) -> Layout:
    """A small model that says it was trained on long texts and can be split over eight GPUs."""
    directory = tmp_path_factory.mktemp("checkpoint")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_stories / name, directory)
    config = json.loads((tiny_stories / "config.json").read_text(encoding="utf-8"))
    config |= {"max_position_embeddings": 1 << 17, "num_attention_heads": 32, "num_key_value_heads": 8}
    (directory / "config.json").write_text(json.dumps(config))
    return inspect(directory)


def test_a_preset_resolves_without_a_word_and_says_what_it_has_to_say(config: Config) -> None:
    assert (config.warnings, config.notes) == ((), ())
    wanted = ("model_id", "tensor_parallel_degree", "max_input_len", "max_output_len", "max_rolling_batch_size")
    assert [name for name in (*wanted, "kv_cache_free_gpu_mem_fraction") if not config.is_set(name)] == []


def test_every_option_of_a_preset_has_an_effect_on_each_of_its_backends(config: Config) -> None:
    asked = config.options.backend
    backends = (Backend.TENSORRT, Backend.PYTORCH) if asked is Backend.AUTO else (asked,)
    assert [deviations(config, effects_on(backend), backend) for backend in backends] == [{}] * len(backends)


def test_the_rules_about_kinds_of_models_have_nothing_against_a_preset(preset: str, config: Config) -> None:
    checked = check_model(config, ROWS[preset].model_type, is_engine=False)
    assert checked.warnings == ()


def test_a_preset_names_a_backend_where_its_model_has_only_one(preset: str, config: Config) -> None:
    row = ROWS[preset]
    wanted = {(True, True): Backend.AUTO, (True, False): Backend.TENSORRT, (False, True): Backend.PYTORCH}
    assert config.options.backend is wanted[row.engine, row.pytorch]


def test_a_preset_comes_to_a_plan_without_a_note_on_every_version_it_is_for(
    config: Config, checkpoint: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TLLM_SPAWN_PROXY_PROCESS", raising=False)
    for version in VERSIONS[config.options.backend]:
        gpu = Gpu("NVIDIA H100", (9, 0), 80 << 30)
        plan = plan_engine(config, checkpoint, Hardware((gpu,) * 8, version, available_memory=64 << 30))
        assert (version, plan.notes) == (version, ())
        assert plan.max_sequences == config.options.max_rolling_batch_size
        assert plan.max_seq_len == config.options.max_input_len + config.options.max_output_len


def test_every_preset_has_a_row_and_every_family_of_the_lmi_document_a_preset() -> None:
    assert sorted(row.preset for row in _rows()) == PRESETS
    families = {row.family for row in ROWS.values()}
    assert [family for family in DOCUMENT_FAMILIES if family not in families] == []


def test_every_option_the_page_names_is_one() -> None:
    named = set(re.findall(r"`(option\.\w+)", PAGE.read_text(encoding="utf-8")))
    assert {name for name in named if find(name) is None} == set()
