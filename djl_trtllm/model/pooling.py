"""The task of a model that does not generate text, and how the output of its layers becomes one vector or one score.

Sentence Transformers keeps that beside a checkpoint: `modules.json` lists the steps, `1_Pooling/config.json` says which
tokens count, `sentence_bert_config.json` how long texts may be. A cross-encoder is a checkpoint for sequence
classification with one label.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from djl_trtllm.config import Task
from djl_trtllm.errors import EngineError, LayoutError
from djl_trtllm.model.checkpoint import ModelShape, part, read_json, read_object
from djl_trtllm.model.layout import Layout
from djl_trtllm.model.tokenizer import Tokenizer

_MODULES = "modules.json"
_LENGTHS = "sentence_bert_config.json"
_ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "modernbert"),
        *("mpnet", "new", "nomic_bert", "roberta", "xlm-roberta"),
    }
)
"""Values of `model_type` of models in which each token sees all others; none of them generates text."""
_OFFSET_POSITIONS = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
"""Model types whose positions begin behind the padding token: `max_position_embeddings` counts earlier places too."""
_STEPS = ("Transformer", "Pooling", "Normalize")
_FOLDER = re.compile(r"\w+")
_ACTIVATIONS = {"Identity": False, "Sigmoid": True}


class Pooled(str, Enum):
    """The tokens of the last layer that make the vector of a text."""

    CLS = "cls"
    """The first token."""
    MEAN = "mean"
    """The mean of all tokens."""
    LAST = "last"


_POOLED = {
    "pooling_mode_cls_token": Pooled.CLS,
    "pooling_mode_mean_tokens": Pooled.MEAN,
    "pooling_mode_lasttoken": Pooled.LAST,
    "cls": Pooled.CLS,
    "mean": Pooled.MEAN,
    "lasttoken": Pooled.LAST,
}
"""Names in a Pooling module's config.json: members that are true, and values of `pooling_mode`."""


_SHOWN = {Pooled.CLS: "first token", Pooled.MEAN: "mean of all tokens", Pooled.LAST: "last token"}


@dataclass(frozen=True)
class Head:
    """The steps that follow the layers of a model that embeds or scores.

    `activates`: a vector is normalised to length 1, a score goes through a sigmoid, where a request does not say
    otherwise. Texts have at most `max_length` tokens, None for as many as the model has positions.
    """

    task: Task
    pooled: Pooled
    activates: bool
    max_length: int | None
    pad_id: int

    def describe(self) -> str:
        """The output for a text, such as "vectors of the last token, normalised"."""
        if self.task is Task.SCORE:
            return f"scores of pairs, {'through a sigmoid' if self.activates else 'as they are'}"
        return f"vectors of the {_SHOWN[self.pooled]}, {'normalised' if self.activates else 'as they are'}"


def find_task(asked: Task, layout: Layout) -> Task:
    """Return the task that the option asks for, or else that of the model's files. Raises LayoutError."""
    config = layout.config or {}
    if asked is not Task.AUTO:
        return asked
    if _modules(layout.path) is not None:
        return Task.EMBED
    return task_of(ModelShape.from_config(config))


def task_of(shape: ModelShape) -> Task:
    """Return the task that a model's config.json alone shows."""
    if (shape.architecture or "").endswith("ForSequenceClassification"):
        return Task.SCORE
    return Task.EMBED if shape.model_type in _ENCODERS else Task.GENERATE


def find_head(task: Task, layout: Layout) -> Head:
    """How the model's output becomes a vector or a score.

    Raises EngineError for a model of another kind, and for steps that are not served; LayoutError for damaged files.
    """
    config = layout.config or {}
    shape = ModelShape.from_config(config)
    pad_id = _number(config, "pad_token_id") or 0
    length = shape.max_position_embeddings
    if length is not None and shape.model_type in _OFFSET_POSITIONS:
        length -= pad_id + 1
    lengths = read_object(layout.path / _LENGTHS, LayoutError) or {}
    if (shorter := _number(lengths, "max_seq_length")) is not None:
        length = min(shorter, length or shorter)
    if task is Task.SCORE:
        _require_one_score(layout, config)
        return Head(task, Pooled.CLS, _has_sigmoid(layout, config), length, pad_id)
    modules = _modules(layout.path)
    if modules is None:
        # DJL's text embedding does it so, and models that generate text are trained for it.
        pooled = Pooled.MEAN if shape.model_type in _ENCODERS else Pooled.LAST
        return Head(task, pooled, True, length, pad_id)
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    place = _folder(modules[min(1, len(modules) - 1)])
    if kinds not in (list(_STEPS[:2]), list(_STEPS)) or modules[0].get("path") or place is None:
        raise EngineError(
            f"{layout.path / _MODULES} has the steps {', '.join(kinds)}: expected {', '.join(_STEPS[:2])} and perhaps "
            f"{_STEPS[2]}, with the checkpoint in the directory itself and the others in folders of it; serve the "
            "model with Text Embeddings Inference"
        )
    pooled = _pooled(layout.path / place / "config.json")
    return Head(task, pooled, kinds == list(_STEPS), length, pad_id)


def check_case(tokenizer: Tokenizer, layout: Layout) -> None:
    """Raise EngineError if texts have to be in lower case and the tokenizer keeps capitals. Raises LayoutError."""
    lengths = read_object(layout.path / _LENGTHS, LayoutError) or {}
    if lengths.get("do_lower_case") is True and tokenizer.encode("A", False) != tokenizer.encode("a", False):
        raise EngineError(
            f"{layout.path / _LENGTHS}: do_lower_case is true, and the tokenizer has other tokens for 'A' than for "
            "'a': expected a tokenizer whose normalizer does that; or set it to false, and send texts in lower case"
        )


def copy_head(checkpoint: Path, out: Path) -> None:
    """Copy the files that `find_head` reads, beside config.json, into a compiled engine's directory.

    Raises OSError and LayoutError.
    """
    folders = map(_folder, _modules(checkpoint) or ())
    for name in (_MODULES, _LENGTHS, *(f"{folder}/config.json" for folder in folders if folder is not None)):
        if (checkpoint / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(checkpoint / name, out / name)


def _folder(module: Mapping[str, Any]) -> str | None:
    """The folder of a step beside the checkpoint; None for one without, or one elsewhere."""
    path = module.get("path")
    return path if isinstance(path, str) and _FOLDER.fullmatch(path) else None


def _modules(directory: Path) -> list[Mapping[str, Any]] | None:
    """The steps of a model of Sentence Transformers; None without a file that lists them. Raises LayoutError."""
    file = directory / _MODULES
    if not file.is_file():
        return None
    steps = read_json(file, LayoutError)
    if isinstance(steps, list) and steps and all(isinstance(step, dict) for step in steps):
        return steps
    raise LayoutError(f"{file}: expected a list of modules; copy it from the model again")


def _pooled(file: Path) -> Pooled:
    config = read_object(file, LayoutError) or {}
    mode = config.get("pooling_mode")
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    named = [mode] if isinstance(mode, str) else modes
    if len(named) != 1 or named[0] not in _POOLED:
        raise EngineError(
            f"{file} pools by {', '.join(named) or 'nothing'}: expected one of the first token, the mean and the last "
            "token; serve the model with Text Embeddings Inference"
        )
    return _POOLED[named[0]]


def _require_one_score(layout: Layout, config: Mapping[str, Any]) -> None:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else _number(config, "num_labels")
    architecture = ModelShape.from_config(config).architecture or "no architecture"
    if not architecture.endswith("ForSequenceClassification") or count != 1:
        raise EngineError(
            f"{layout.path / 'config.json'} names {architecture} with {2 if count is None else count} labels: expected "
            "a cross-encoder, that is a model for sequence classification with one label; classifiers are not served"
        )


def _has_sigmoid(layout: Layout, config: Mapping[str, Any]) -> bool:
    """Whether scores go through a sigmoid, as Sentence Transformers' and vLLM's do unless config.json differs."""
    named = part(config, "sentence_transformers").get("activation_fn") or config.get(
        "sbert_ce_default_activation_function"
    )
    if named is None:
        return True
    name = str(named).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise EngineError(
            f"{layout.path / 'config.json'}: the activation of the score is {name}: expected one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and value >= 0 else None
