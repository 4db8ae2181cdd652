"""The task of a model, and how its output becomes a vector or a score, by its files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from djl_trtllm.config import Task
from djl_trtllm.errors import EngineError, LayoutError
from djl_trtllm.model import Layout, ModelKind, load_tokenizer
from djl_trtllm.model.pooling import Head, Pooled, copy_head, find_head, find_task
from tests.support.encoders import write_modules
from tests.support.tables import by_rows

BERT = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512, "hidden_size": 48}
DECODER = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 4096}
_TRANSFORMER = {"type": "a.Transformer", "path": ""}
_POOLING = {"type": "a.Pooling", "path": "1_Pooling"}
RERANKER = {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def layout(directory: Path, config: dict[str, Any]) -> Layout:
    return Layout(ModelKind.HF_CHECKPOINT, directory, config, (), directory)


@by_rows(
    ("config", "modules", "asked", "task"),
    [
        (BERT, False, Task.AUTO, Task.EMBED),
        ({**BERT, "architectures": ["BertForMaskedLM"]}, False, Task.AUTO, Task.EMBED),
        ({"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}, False, Task.AUTO, Task.EMBED),
        (RERANKER, False, Task.AUTO, Task.SCORE),
        (DECODER, False, Task.AUTO, Task.GENERATE),
        (DECODER, True, Task.AUTO, Task.EMBED),
        (DECODER, True, Task.GENERATE, Task.GENERATE),
        (DECODER, False, Task.EMBED, Task.EMBED),
        ({}, False, Task.AUTO, Task.GENERATE),
    ],
)
def test_the_files_say_what_a_model_is_for_unless_the_option_does(
    config: dict[str, Any], modules: bool, asked: Task, task: Task, tmp_path: Path
) -> None:
    if modules:
        write_modules(tmp_path)
    assert find_task(asked, layout(tmp_path, config)) is task


@by_rows(
    ("mode", "pooled"),
    [("cls_token", Pooled.CLS), ("mean_tokens", Pooled.MEAN), ("lasttoken", Pooled.LAST)],
)
@by_rows("normalize", [True, False])
def test_the_modules_say_which_tokens_count_and_whether_vectors_are_normalised(
    mode: str, pooled: Pooled, normalize: bool, tmp_path: Path
) -> None:
    write_modules(tmp_path, mode=mode, normalize=normalize, length=128)
    assert find_head(Task.EMBED, layout(tmp_path, BERT)) == Head(Task.EMBED, pooled, normalize, 128, 0)


def test_the_newer_form_of_a_pooling_module_is_read(tmp_path: Path) -> None:
    write_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls", "embedding_dimension": 48}')
    assert find_head(Task.EMBED, layout(tmp_path, BERT)).pooled is Pooled.CLS


@pytest.mark.parametrize(("config", "pooled"), [(BERT, Pooled.MEAN), (DECODER, Pooled.LAST)])
def test_without_modules_an_encoder_has_the_mean_and_a_decoder_the_last_token(
    config: dict[str, Any], pooled: Pooled, tmp_path: Path
) -> None:
    head = find_head(Task.EMBED, layout(tmp_path, config))
    assert (head.pooled, head.activates) == (pooled, True)


@pytest.mark.parametrize(
    ("model_type", "pad", "longest"),
    [("bert", 0, 514), ("xlm-roberta", 1, 512), ("roberta", 1, 512), ("camembert", 1, 512), ("mpnet", 1, 512)],
)
def test_positions_before_the_first_token_are_none_of_a_text(
    model_type: str, pad: int, longest: int, tmp_path: Path
) -> None:
    config = {"model_type": model_type, "pad_token_id": pad, "max_position_embeddings": 514}
    head = find_head(Task.EMBED, layout(tmp_path, config))
    assert (head.max_length, head.pad_id) == (longest, pad)


@pytest.mark.parametrize(
    ("more", "activates"),
    [
        ({}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
    ],
)
def test_a_score_has_the_activation_that_config_json_names(
    more: dict[str, Any], activates: bool, tmp_path: Path
) -> None:
    assert find_head(Task.SCORE, layout(tmp_path, RERANKER | more)).activates is activates


@pytest.mark.parametrize(
    ("task", "config", "named"),
    [
        (Task.SCORE, BERT, "BertModel"),
        (Task.SCORE, {**RERANKER, "id2label": {"0": "a", "1": "b"}}, "2 labels"),
        (Task.SCORE, {**RERANKER, "sbert_ce_default_activation_function": "torch.nn.Tanh"}, "Tanh"),
    ],
)
def test_a_model_that_gives_no_single_score_is_refused_by_name(
    task: Task, config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=named):
        find_head(task, layout(tmp_path, config))


@by_rows(
    ("steps", "named"),
    [
        (
            [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense"}],
            "Dense",
        ),
        ([{"type": "a.Transformer", "path": "0_Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}], "directory"),
        ([{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../secret"}], "directory"),
        ([_TRANSFORMER, {"type": "a.Pooling"}], "directory"),
        ([_TRANSFORMER, {"type": "a.Pooling", "path": None}], "directory"),
        ([_TRANSFORMER, {"type": "a.Pooling", "path": 1}], "directory"),
        ([{"type": "a.CLIPModel"}], "CLIPModel"),
    ],
)
def test_steps_that_are_not_served_are_refused_by_name(steps: list[dict[str, Any]], named: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(EngineError, match=named):
        find_head(Task.EMBED, layout(tmp_path, BERT))


@pytest.mark.parametrize("pooling", [{}, {"pooling_mode_max_tokens": True}, {"pooling_mode": 5}])
def test_a_pooling_that_is_not_served_is_refused(pooling: dict[str, Any], tmp_path: Path) -> None:
    write_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(EngineError, match="1_Pooling"):
        find_head(Task.EMBED, layout(tmp_path, BERT))


@pytest.mark.parametrize("text", ["{", "{}", "[]", "[1]", "null"])
def test_a_damaged_list_of_modules_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(LayoutError, match=r"modules\.json"):
        find_task(Task.AUTO, layout(tmp_path, BERT))


@pytest.mark.parametrize("folder", ["1_Pooling", "pooling"])
def test_a_compiled_engine_has_what_says_how_it_is_used(folder: str, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    write_modules(tmp_path, mode="cls_token", length=77)
    (tmp_path / "1_Pooling").rename(tmp_path / folder)
    (tmp_path / "modules.json").write_text(json.dumps([_TRANSFORMER, _POOLING | {"path": folder}]))
    copy_head(tmp_path, tmp_path / "engine")
    source, copy = (find_head(Task.EMBED, layout(each, BERT)) for each in (tmp_path, tmp_path / "engine"))
    assert copy == source


@pytest.mark.parametrize("typed", [True, False])
def test_texts_are_surrounded_and_cut_as_their_own_tokenizer_does_it(tmp_path: Path, typed: bool) -> None:
    """The longer text first, and never the special tokens as long as there is room for them."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *"abcdefgh"])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    second = int(typed)
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair=f"[CLS]:0 $A:0 [SEP]:0 $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for one, other in itertools.product(range(1, 5), range(5)):
        first, pair = "abcd"[:one], "efgh"[:other]
        ids = [tokenizer.encode(" ".join(text), False) for text in (first, pair)]
        for most in (None, *range(3 if pair else 2, 12)):
            raw.no_truncation() if most is None else raw.enable_truncation(most, strategy="longest_first")
            whole = raw.encode(" ".join(first), " ".join(pair)) if pair else raw.encode(" ".join(first))
            found, start = tokenizer.surround(ids[0], ids[1] if pair else None, most)
            assert found == whole.ids, (first, pair, most)
            assert start == (whole.type_ids.index(1) if pair and typed and 1 in whole.type_ids else 0)
    assert [len(tokenizer.surround([3, 4], [5], most)[0]) for most in (0, 1, 2)] == [0, 1, 2], "no more than asked for"
