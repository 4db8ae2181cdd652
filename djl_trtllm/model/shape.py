"""A model's sizes from its config.json, with one set of names for all families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
_VOCAB = ("vocab_size", "padded_vocab_size")
_INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder model; None if config.json does not say."""

    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    architecture: str | None = None
    model_type: str | None = None
    dtype: str | None = None
    """As in config.json, without `torch.`: `bfloat16`."""
    parameter_bytes: int | None = None
    """Stored size of all weights in bytes, from the headers of the weight files."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, parameter_bytes: int | None = None) -> ModelShape:
        """Read the config.json of a Hugging Face checkpoint, TensorRT-LLM checkpoint or TensorRT-LLM engine.

        Models with several parts (`text_config`, `llm_config`, …) are described by their text part.
        """
        text = text_part(config)
        architectures = config.get("architectures")
        listed = architectures if isinstance(architectures, list) else []
        architecture = listed[0] if listed else text.get("architecture")
        model_type = text.get("model_type") or config.get("model_type")
        heads = _number(text, _HEADS)
        hidden = _number(text, _HIDDEN)
        head_dim = _number(text, ("head_dim", "head_size", "kv_channels", "attention_head_dim"))
        if head_dim is None and hidden and heads:
            head_dim = hidden // heads or None
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
        return cls(
            num_layers=_number(text, _LAYERS) or _listed_layers(text),
            num_heads=heads,
            num_kv_heads=_kv_heads(text, heads),
            head_dim=head_dim,
            hidden=hidden,
            intermediate=_number(text, _INTERMEDIATE),
            vocab_size=_number(text, _VOCAB) or _number(config, _VOCAB),
            max_position_embeddings=_positions(text),
            architecture=architecture if isinstance(architecture, str) else None,
            model_type=model_type if isinstance(model_type, str) else None,
            dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
            parameter_bytes=parameter_bytes,
        )


def _listed_layers(text: Mapping[str, Any]) -> int | None:
    """Some hybrid models list the kind of each layer instead of giving their number (Nemotron 3 Ultra)."""
    listed = text.get("layers_block_type")
    return len(listed) or None if isinstance(listed, list) else None


def _positions(text: Mapping[str, Any]) -> int | None:
    """The longest sequence. As in TensorRT-LLM (builder.py, 1.2), linear and dynamic scaling stretch it."""
    positions = _number(text, _POSITIONS)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or text.get("rotary_scaling")
    if positions is None or not isinstance(scaling, dict):
        return positions
    factor = scaling.get("factor")
    stretches = scaling.get("type", scaling.get("rope_type")) in ("linear", "dynamic")
    return int(positions * factor) if stretches and isinstance(factor, int | float) and factor > 1 else positions


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model; of most models, the whole."""
    for key in ("pretrained_config", "builder_config", "text_config", "llm_config", "language_config"):
        part = config.get(key)
        if isinstance(part, dict) and part:
            return text_part(part)
    return config


def _kv_heads(text: Mapping[str, Any], heads: int | None) -> int | None:
    if text.get("multi_query_attention") is False:  # ChatGLM gives a number of groups even without groups
        return heads
    # The first Falcon has one key-value head by default; later ones give the number, and may have `multi_query` set
    # as well.
    if text.get("model_type") in ("falcon", "RefinedWeb", "RefinedWebModel") and not text.get(
        "new_decoder_architecture"
    ):
        if "n_head_kv" in text:
            return _number(text, ("n_head_kv",))
        return 1 if text.get("multi_query", True) else heads
    found = _number(text, _KV_HEADS)
    if found is not None:
        return found
    attention = text.get("attn_config")
    if isinstance(attention, dict) and (found := _number(attention, ("kv_n_heads",))):  # MPT, DBRX
        return found
    multi_query = text.get("multi_query", text.get("model_type") == "gpt_bigcode")
    return 1 if multi_query is True else heads


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
