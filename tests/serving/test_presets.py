"""The presets resolve without a word and agree with docs/models.md; the bundled model is as its card says."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer

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


# -- the bundled model -------------------------------------------------------------------------------------------------


SERVING = Path(__file__).resolve().parents[2] / "serving"
MODEL = SERVING / "models" / "tiny-stories"
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def grammar() -> Any:
    """The module that told the stories; those that it imports lie beside it."""
    sys.path.insert(0, str(SERVING / "tiny_stories"))
    try:
        return importlib.import_module("grammar")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def auto_tokenizer() -> Any:
    """The tokenizer, loaded by transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def loaded_json(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODEL / name).read_text(encoding="utf-8"))
    return loaded


def tensors() -> dict[str, dict[str, Any]]:
    with (MODEL / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


RAW = Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@given(UNICODE)
def test_the_tokenizer_writes_down_any_text(text: str) -> None:
    ids = RAW.encode(text).ids
    assert ids[0] == 1
    assert RAW.decode(ids[1:], skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["🐺🏠", "👩‍👩‍👧 e\u0301", "  two  spaces \n\n\tand a tab ", "Ünïcödé 狼と少女", ""])
def test_auto_tokenizer_round_trips(auto_tokenizer: Any, text: str) -> None:
    ids = auto_tokenizer(text)["input_ids"]
    assert ids[0] == 1 and 2 not in ids
    assert auto_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_ids(auto_tokenizer: Any) -> None:
    assert (auto_tokenizer.unk_token_id, auto_tokenizer.bos_token_id, auto_tokenizer.eos_token_id) == (0, 1, 2)
    assert auto_tokenizer.pad_token_id == 0
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    assert auto_tokenizer.convert_tokens_to_ids(roles) == [3, 4, 5]
    assert RAW.encode("".join(roles)).ids == [1, 3, 4, 5]


def test_the_chat_template_renders(auto_tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "You are a storyteller."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "Tell me a story"}]},
    ]
    text = auto_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<s><|system|>You are a storyteller.<|user|>Hello<|assistant|>Hello!</s><|user|>Tell me a story<|assistant|>"
    )
    without = auto_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    assert without + "<|assistant|>" == text
    ids = auto_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[:2] == [1, 3] and ids[-1] == 5 and ids.count(2) == 1
    with pytest.raises(Exception, match="roles"):
        auto_tokenizer.apply_chat_template([{"role": "wolf", "content": "Let me in"}], tokenize=False)


def test_the_weights_are_small_and_of_half_precision_and_their_configuration_fits() -> None:
    held = tensors()
    assert sum(math.prod(entry["shape"]) for entry in held.values()) <= 5_000_000
    assert {entry["dtype"] for entry in held.values()} == {"F16"}
    assert sum(path.stat().st_size for path in MODEL.iterdir() if path.is_file()) <= 11_000_000
    expected = {"architectures": ["LlamaForCausalLM"], "dtype": "float16", "max_position_embeddings": 4096}
    expected |= {"vocab_size": RAW.get_vocab_size(), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert expected.items() <= loaded_json("config.json").items()
    assert loaded_json("generation_config.json")["eos_token_id"] == 2


def test_a_seed_is_a_corpus(grammar: Any) -> None:
    def corpus(seed: int) -> list[Any]:
        rng = random.Random(seed)
        return [grammar.document(rng) for _ in range(30)]

    assert corpus(1) == corpus(1)
    assert corpus(1) != corpus(2)


@given(seed=st.integers(min_value=0, max_value=2**32))
def test_stories_are_short_and_finished(grammar: Any, seed: int) -> None:
    told = grammar.story(random.Random(seed))
    assert 60 <= len(told.text.split()) <= 250
    assert not re.search(r"[\[\]{}|]|  |\ba [aeio]", told.text)
    assert told.text[0].isupper() and told.text.endswith((".", "!", '"'))
    assert told.subjects


def test_every_plot_can_be_reported(grammar: Any) -> None:
    rng = random.Random(0)
    beginnings = {grammar.story(rng).text[:200] for _ in range(400)}
    assert len(beginnings) > 300
    assert len(grammar.PLOTS) >= 15
