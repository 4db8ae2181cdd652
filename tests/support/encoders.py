"""Tiny random encoders, as transformers and Sentence Transformers save them, and what transformers makes of texts."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.reference import story

TEXTS = tuple(story(1 + at % 7, at % 16)[: 17 * (1 + at)] for at in range(64))
"""64 texts of four to some hundred tokens."""
QUERY = "Where did the wolf meet the little girl?"

_VOCABULARY = 400
_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 514,
    "vocab_size": _VOCABULARY,
}
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_wordpiece(directory: Path) -> None:
    """BERT's kind of tokenizer, for the words of TEXTS."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = sorted({word for text in (*TEXTS, QUERY) for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    letters = sorted(set(string.ascii_lowercase + string.digits + string.punctuation))
    known = [*_SPECIAL, *letters, *(f"##{each}" for each in letters), *(word for word in words if len(word) > 1)]
    vocabulary = {token: at for at, token in enumerate(known[:_VOCABULARY])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing("[CLS]:0 $A:0 [SEP]:0", pair, ends)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = zip(("pad", "unk", "cls", "sep", "mask"), _SPECIAL, strict=True)
    config = {f"{name}_token": token for name, token in named} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def scripted_encoder(
    directory: Path, script: Mapping[str, object] | None = None, /, *, labels: int = 0, **options: object
) -> Path:
    """An encoder's files in front of the scripted executor; with `labels`, those of a cross-encoder."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    write_wordpiece(directory)
    save_file({"embeddings": np.zeros((1, 1), np.float32)}, directory / "model.safetensors")
    kind = "BertForSequenceClassification" if labels else "BertModel"
    config = {"architectures": [kind], "model_type": "bert", "pad_token_id": 0, **_SIZES, "num_hidden_layers": 0}
    (directory / "config.json").write_text(json.dumps(config | ({"num_labels": labels} if labels else {})))
    values = {"option.backend": "scripted", "option.script": json.dumps(script or {}), **options}
    (directory / "serving.properties").write_text("".join(f"{key}={value}\n" for key, value in values.items()))
    return directory


def write_encoder(directory: Path, model_type: str = "bert", *, labels: int = 0, **changes: Any) -> Path:
    """A random checkpoint; with `labels`, one for sequence classification."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # several are slower: the model is tiny
    torch.manual_seed(5)
    sizes = {**_SIZES, "pad_token_id": 0, **({"num_labels": labels} if labels else {}), **changes}
    kind = AutoModelForSequenceClassification if labels else AutoModel
    model = kind.from_config(AutoConfig.for_model(model_type, **sizes))
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim > 1:
                values.normal_(0, 0.2)  # with smaller weights all texts are nearly the same
    model.save_pretrained(directory)
    write_wordpiece(directory)
    return directory


def write_modules(directory: Path, *, mode: str = "mean_tokens", normalize: bool = True, length: int = 512) -> Path:
    """Sentence Transformers' files beside a checkpoint."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    steps = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(steps))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    pooling = {f"pooling_mode_{name}": name == mode for name in names} | {"word_embedding_dimension": 48}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def embeddings(checkpoint: Path, texts: Sequence[str], *, mode: str = "mean_tokens", normalize: bool = True) -> Any:
    """What transformers makes of each text alone, in float32: an array with a row for each."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModel.from_pretrained(checkpoint).eval()
    rows = []
    for text in texts:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=512)).last_hidden_state[0]
        row = {"cls_token": hidden[0], "mean_tokens": hidden.mean(0), "lasttoken": hidden[-1]}[mode]
        rows.append(row / row.norm() if normalize else row)
    return torch.stack(rows).numpy()


def scores(checkpoint: Path, query: str, texts: Sequence[str], *, max_length: int = 512) -> Any:
    """What transformers makes of each pair alone, after the sigmoid."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    found = []
    for text in texts:
        given = tokenizer(query, text, return_tensors="pt", truncation=True, max_length=max_length)
        with torch.inference_mode():
            found.append(torch.sigmoid(model(**given).logits[0, 0]))
    return torch.stack(found).numpy()
