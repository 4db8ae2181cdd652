"""The sizes of a checkpoint: its tensors, and what its layers keep of a sequence. Reads headers, never weights.

A config.json may hold anything: what is not of the expected type counts as absent.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from djl_trtllm.errors import LayoutError, SizingError
from djl_trtllm.files import read_table
from djl_trtllm.model.archive import ARCHIVE_SUFFIXES, is_archive
from djl_trtllm.model.checkpoint import (
    EXPERTS,
    Header,
    ModelShape,
    check_counts,
    find_weights,
    first_positive,
    part,
    read_header,
    read_object,
    stored_kv_quantization,
    stored_quantization,
    text_part,
)
from djl_trtllm.model.remote.fetch import fetch, is_remote, remote_headers
from djl_trtllm.model.vision import Vision
from djl_trtllm.sizing.tensors import OF_TORCH, Part, WeightTensor, parts_of, tensors_of

_FAMILIES = read_table("families.toml", __package__)
"""Properties of families of models that their config.json need not have."""


def positive(text: Mapping[str, Any], name: str) -> int | None:
    return first_positive(text, (name,))


def listed(text: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The list under a key, empty if there is none."""
    value = text.get(name)
    return value if isinstance(value, list) else ()


def model_type(text: Mapping[str, Any]) -> str:
    value = text.get("model_type")
    return value if isinstance(value, str) else ""


Kind = Literal["attention", "latent", "state", "none"]


@dataclass(frozen=True)
class LayerCache:
    """The part of a sequence that one layer keeps.

    `attention` keeps a key and a value of `kv_heads` x `head_dim` per token. `latent` (MLA) keeps one vector of
    `head_dim` for all heads, the same on every rank. `state` (Mamba, linear attention) keeps `state` bytes of a
    sequence, whatever its length. The layer attends to `window` tokens if it has a window.
    """

    kind: Kind
    kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    state: int = 0
    """Bytes per sequence of a recurrent state, in place of keys or beside them."""
    value_dim: int | None = None
    """The length of a value where it is not that of a key."""

    def per_token(self, tensor_parallel: int) -> int:
        """Elements per token on one rank: a rank has at least one head, so few heads are replicated."""
        if self.kind == "latent":
            return self.head_dim
        if self.kind == "attention":
            both = self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)
            return both * max(1, -(-self.kv_heads // tensor_parallel))
        return 0

    def per_sequence(self, tensor_parallel: int) -> int:
        """Bytes of the state on one rank."""
        return -(-self.state // tensor_parallel)


def layer_caches(config: Mapping[str, Any]) -> tuple[LayerCache, ...]:
    """One entry per layer, from a config.json. Empty if it does not give layers, heads and their size."""
    shape = ModelShape.from_config(config)
    text = text_part(config)
    if not shape.num_layers:
        return ()
    kinds = _kinds(text, shape.num_layers)
    windows = _windows(text, shape.num_layers)
    latent = positive(text, "kv_lora_rank")
    elements = _state(text)
    # The convolution's are in 16 bits, the state's own in what the model asks for.
    wide = text.get("mamba_ssm_dtype", text.get("mamba_ssm_cache_dtype")) == "float32"
    state = 2 * elements.convolution + (4 if wide else 2) * elements.own
    caches = []
    for index, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if kind == "none":
            caches.append(LayerCache("none"))
        elif kind == "state":
            caches.append(LayerCache("state", state=state))
        elif latent:
            caches.append(LayerCache("latent", 1, latent + (positive(text, "qk_rope_head_dim") or 0), window))
        else:
            heads, keys, values = _heads(text, shape, index, window)
            caches.append(LayerCache("attention", heads, keys, window, state if kind == "both" else 0, values))
    return tuple(caches)


def _heads(text: Mapping[str, Any], shape: ModelShape, index: int, window: int | None) -> tuple[int, int, int | None]:
    """Heads of keys, and the sizes of a key and of a value. The layers of a few models differ in these."""
    block = _block(text, index)
    if block is not None and shape.num_heads:
        return shape.num_heads // (positive(block, "n_heads_in_group") or 1), shape.head_dim or 0, None
    # MiMo-V2 has other heads in layers with a window, Gemma 4 in those without.
    names = (
        ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")
        if window
        else ("num_global_key_value_heads", "global_head_dim", "")
    )
    heads, keys, values = (positive(text, name) for name in names)
    keys = keys or shape.head_dim or 0
    values = values or positive(text, "v_head_dim")
    return heads or shape.num_kv_heads or 0, keys, None if values == keys else values


def _block(text: Mapping[str, Any], index: int) -> Mapping[str, Any] | None:
    """The attention of one layer of an architecture search (DeciLM, Llama-Nemotron); None for other models."""
    blocks = listed(text, "block_configs")
    if index >= len(blocks) or not isinstance(blocks[index], dict):
        return None
    return part(blocks[index], "attention")


_RECURRENT = {"mamba", "linear_attention", "recurrent", "M", "mamba2"}
_NOTHING = {"-", "mlp", "E", "moe"}


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """`attention`, `state`, `both` or `none` of each layer."""
    family = model_type(text)
    if family in ("mamba", "mamba2", "falcon_mamba"):
        return ["state"] * layers
    if family == "falcon_h1":
        return ["both"] * layers
    named = _named_kinds(text, layers)
    if named:
        return named
    if listed(text, "block_configs"):
        blocks = [_block(text, index) or {} for index in range(layers)]
        return ["none" if block.get("no_op") or block.get("replace_with_linear") else "attention" for block in blocks]
    linear = listed(part(text, "linear_attn_config"), "kda_layers")
    if linear:  # Kimi Linear counts from 1
        return ["state" if index + 1 in linear else "attention" for index in range(layers)]
    if indices := listed(text, "attn_layer_indices"):  # Bamba
        return ["attention" if index in indices else "state" for index in range(layers)]
    if period := positive(text, "attn_layer_period"):  # Jamba
        offset = positive(text, "attn_layer_offset") or 0
        return ["attention" if index % period == offset else "state" for index in range(layers)]
    if interval := positive(text, "full_attention_interval"):  # Qwen3-Next
        return ["attention" if (index + 1) % interval == 0 else "state" for index in range(layers)]
    return ["attention"] * layers


def _named_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """The kinds of all layers, from a list in config.json; empty without one."""
    pattern = text.get("hybrid_override_pattern")  # Nemotron-H
    blocks = listed(text, "block_types") or listed(text, "_block_types")  # RecurrentGemma repeats its pattern
    lists = (
        list(pattern) if isinstance(pattern, str) else (),
        listed(text, "layer_types"),
        listed(text, "layers_block_type"),
        [blocks[index % len(blocks)] for index in range(layers)] if blocks else (),
    )
    named = next((names for names in lists if len(names) == layers), ())
    return [_kind(str(name)) for name in named]


def _kind(name: str) -> str:
    return "state" if name in _RECURRENT else "none" if name in _NOTHING else "attention"


def _windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    window = positive(text, "sliding_window") or positive(text, "attention_window_size")
    chunk = positive(text, "attention_chunk_size")
    if text.get("use_sliding_window") is False:
        window = None
    types = listed(text, "layer_types")
    if len(types) == layers:
        return [_window_of(name, window, chunk) for name in types]
    marks = listed(text, "hybrid_layer_pattern")  # MiMo-V2: 1 for a layer with a window
    if len(marks) == layers:
        return [window if mark == 1 else None for mark in marks]
    if window is None:
        return [None] * layers
    pattern = positive(text, "sliding_window_pattern") or _FAMILIES["patterns"].get(model_type(text))
    if pattern:  # every nth layer sees everything
        return [None if (index + 1) % pattern == 0 else window for index in range(layers)]
    full = positive(text, "max_window_layers") if text.get("use_sliding_window") else None
    return [window if index >= (full or 0) else None for index in range(layers)]


def _window_of(name: object, window: int | None, chunk: int | None) -> int | None:
    return window if name == "sliding_attention" else chunk if name == "chunked_attention" else None


class _State(NamedTuple):
    """Elements of one layer's recurrent state: the last inputs of the convolution, and the state itself."""

    convolution: int
    own: int


def _state(text: Mapping[str, Any]) -> _State:
    if heads := positive(text, "linear_num_value_heads"):  # Qwen3-Next: gated delta net
        size = positive(text, "linear_key_head_dim") or 128
        keys = (positive(text, "linear_num_key_heads") or heads) * size
        values = heads * (positive(text, "linear_value_head_dim") or 128)
        kernel = positive(text, "linear_conv_kernel_dim") or 4
        return _State((2 * keys + values) * (kernel - 1), values * size)
    linear = part(text, "linear_attn_config")
    if linear:  # Kimi Linear
        heads, size = positive(linear, "num_heads") or 0, positive(linear, "head_dim") or 0
        kernel = positive(linear, "short_conv_kernel_size") or 4
        return _State(3 * heads * size * (kernel - 1), heads * size * size)
    hidden = first_positive(text, ("hidden_size", "d_model", "n_embd")) or 0
    size = first_positive(text, ("ssm_state_size", "mamba_d_state", "state_size")) or 0
    kernel = first_positive(text, ("conv_kernel", "mamba_d_conv", "conv1d_width")) or 4
    if width := positive(text, "lru_width"):  # RecurrentGemma
        return _State(width * (kernel - 1), width)
    heads = first_positive(text, ("mamba_num_heads", "mamba_n_heads"))
    head_dim = first_positive(text, ("mamba_head_dim", "mamba_d_head"))
    inner = (heads or 0) * (head_dim or 0) or positive(text, "mamba_d_ssm") or 0
    inner = inner or hidden * (first_positive(text, ("mamba_expand", "expand")) or 2)
    groups = first_positive(text, ("n_groups", "mamba_n_groups")) or 0
    return _State((kernel - 1) * (inner + 2 * groups * size), inner * size)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the embedding's matrix is the head's too."""
    text = text_part(config)
    said = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return said is True or (said is None and model_type(text) in _FAMILIES["tied"])


def num_experts(text: Mapping[str, Any]) -> int:
    found = first_positive(text, EXPERTS) or 0
    return found if found > 1 else 0


def experts_per_token(text: Mapping[str, Any]) -> int:
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "experts_per_token", "moe_k")
    return (first_positive(text, names) or 1) if num_experts(text) else 0


def expected_tensors(config: Mapping[str, Any]) -> tuple[WeightTensor, ...]:
    """Tensors with the shapes of a decoder of this config.json; empty if it lacks layers, hidden size or heads."""
    shape = ModelShape.from_config(config)
    if not (shape.num_layers and shape.hidden and shape.num_heads and shape.head_dim):
        return ()
    dtype = OF_TORCH.get(shape.dtype or "", "BF16")
    return tuple(WeightTensor(name, dtype, sizes) for name, sizes in _named(config, shape))


def _named(config: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    text = text_part(config)
    hidden, vocab = shape.hidden or 0, shape.vocab_size or 0
    yield "model.embed_tokens.weight", (vocab, hidden)
    single = model_type(text) == "nemotron_h"  # a layer is one of the parts
    for index, cache in enumerate(layer_caches(config)):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        if cache.kind == "latent":
            yield from _latent_attention(layer, text, shape)
        elif cache.kind == "attention":
            yield from _attention(layer, text, shape, cache)
        elif cache.kind == "state":
            yield from _mixer(layer, text, hidden)
        if not single or cache.kind == "none":
            yield f"{layer}.post_attention_layernorm.weight", (hidden,)
            yield from _feed_forward(layer, index, text, shape)
    yield "model.norm.weight", (hidden,)
    if not is_tied(config):
        yield "lm_head.weight", (vocab, hidden)


def _attention(
    layer: str, text: Mapping[str, Any], shape: ModelShape, cache: LayerCache
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = shape.hidden or 0, (shape.num_heads or 0) * cache.head_dim
    value_dim = cache.head_dim if cache.value_dim is None else cache.value_dim
    keys = cache.kv_heads * cache.head_dim
    yield f"{layer}.self_attn.q_proj.weight", (width, hidden)
    yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
    yield f"{layer}.self_attn.v_proj.weight", (cache.kv_heads * value_dim, hidden)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, (shape.num_heads or 0) * value_dim)
    if text.get("attention_bias") or model_type(text) in ("qwen2", "qwen2_moe", "gpt2"):
        yield f"{layer}.self_attn.q_proj.bias", (width,)
        yield f"{layer}.self_attn.k_proj.bias", (keys,)
        yield f"{layer}.self_attn.v_proj.bias", (keys,)


def _mixer(layer: str, text: Mapping[str, Any], hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The matrices of Mamba or linear attention in a layer: a projection into the mixer and one out of it."""
    heads, head_dim = positive(text, "mamba_num_heads") or 0, positive(text, "mamba_head_dim") or 0
    if values := positive(text, "linear_num_value_heads"):
        inner = values * (positive(text, "linear_value_head_dim") or 128)
        keys = (positive(text, "linear_num_key_heads") or values) * (positive(text, "linear_key_head_dim") or 128)
        width = 2 * keys + 2 * inner + 2 * values
    else:
        inner = heads * head_dim or hidden * (positive(text, "mamba_expand") or positive(text, "expand") or 2)
        width = 2 * inner + 2 * (positive(text, "n_groups") or 0) * (positive(text, "ssm_state_size") or 0) + heads
    yield f"{layer}.mixer.in_proj.weight", (width, hidden)
    yield f"{layer}.mixer.out_proj.weight", (hidden, inner)


def _latent_attention(layer: str, text: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = shape.hidden or 0, shape.num_heads or 0
    rope, nope = positive(text, "qk_rope_head_dim") or 0, positive(text, "qk_nope_head_dim") or 0
    value, rank = positive(text, "v_head_dim") or nope, positive(text, "kv_lora_rank") or 0
    if query := positive(text, "q_lora_rank"):
        yield f"{layer}.self_attn.q_a_proj.weight", (query, hidden)
        yield f"{layer}.self_attn.q_b_proj.weight", (heads * (nope + rope), query)
    else:
        yield f"{layer}.self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{layer}.self_attn.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{layer}.self_attn.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, heads * value)


def _feed_forward(
    layer: str, index: int, text: Mapping[str, Any], shape: ModelShape
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden or 0
    width = shape.intermediate or 4 * hidden
    two = model_type(text) in _FAMILIES["two_matrices"]
    names = ("up_proj", "down_proj") if two else ("gate_proj", "up_proj", "down_proj")
    experts = num_experts(text)
    if not experts or _is_dense(text, index):
        searched = _searched_width(text, index, hidden)
        yield from _mlp(f"{layer}.mlp", names, hidden, positive(text, "intermediate_size_mlp") or width, searched)
        return
    own = positive(text, "moe_intermediate_size") or width
    # The experts of some models work on a shorter vector, with a matrix into and out of it.
    latent = positive(text, "moe_latent_size") or positive(text, "routed_expert_hidden_size")
    yield f"{layer}.mlp.gate.weight", (experts, hidden)
    if latent:
        yield f"{layer}.mlp.into_latent.weight", (latent, hidden)
        yield f"{layer}.mlp.out_of_latent.weight", (hidden, latent)
    for name, sizes in _mlp(f"{layer}.mlp.experts", names, latent or hidden, own):
        yield name, (experts, *sizes)
    shared = positive(text, "shared_expert_intermediate_size") or positive(text, "moe_shared_expert_intermediate_size")
    count = positive(text, "n_shared_experts") or positive(text, "num_shared_experts") or 0
    shared = shared or own * (1 if model_type(text) == "llama4_text" else count)
    if shared:
        yield from _mlp(f"{layer}.mlp.shared_experts", names, hidden, shared)


def _is_dense(text: Mapping[str, Any], index: int) -> bool:
    """Return whether a layer has no experts in a model that has some."""
    every = listed(text, "moe_layer_freq")
    if index < len(every):
        return not every[index]
    step = positive(text, "interleave_moe_layer_step") or 1
    dense = index < (positive(text, "first_k_dense_replace") or 0) or index in listed(text, "mlp_only_layers")
    return dense or (index + 1) % step != 0


def _searched_width(text: Mapping[str, Any], index: int, hidden: int) -> int | None:
    """The inner size of a layer of an architecture search (DeciLM): 0 without MLP; None for others."""
    blocks = listed(text, "block_configs")
    ffn = part(blocks[index], "ffn") if index < len(blocks) and isinstance(blocks[index], dict) else {}
    if not ffn:
        return None
    if ffn.get("no_op") or ffn.get("replace_with_linear"):
        return 0
    multiple = ffn.get("ffn_mult")
    if not isinstance(multiple, int | float) or multiple <= 0:
        return None
    # As in its modeling_decilm.py: two thirds of the multiple, rounded up to 256.
    return -(-int(2 * multiple * hidden / 3) // 256) * 256


def _mlp(
    name: str, matrices: tuple[str, ...], hidden: int, width: int, searched: int | None = None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = width if searched is None else searched
    for matrix in matrices:
        yield f"{name}.{matrix}.weight", (hidden, width) if matrix == "down_proj" else (width, hidden)


_IMAGES = re.compile(r"[1-9]\d{0,3}(:[1-9]\d{0,4}x[1-9]\d{0,4})?")


@dataclass(frozen=True)
class CheckpointSizes:
    """A model's tensors and caches, as the estimate needs them.

    `exact`: whether the tensors were read from the headers of weight files, not counted from config.json.
    """

    shape: ModelShape
    layers: tuple[LayerCache, ...]
    parts: tuple[Part, ...]
    """The tensors, summed by what decides their division among ranks."""
    source: str
    quantization: str | None
    """The stored quantisation, by TensorRT-LLM's name; None if the weights are not quantised."""
    kv_quantization: str | None
    """Quantisation of the KV cache, if the checkpoint asks for one."""
    tied: bool
    experts: int
    experts_per_token: int
    exact: bool
    vision: Vision | None
    """How the model takes images; None where it takes none, or it is not known how."""

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.parts)

    @property
    def parameters(self) -> int:
        return sum(each.elements for each in self.parts)

    def image_tokens(self, images: str) -> int:
        """The tokens of a prompt's images: "2" are two of the largest, "2:1024x768" two of these pixels.

        Raises SizingError.
        """
        if _IMAGES.fullmatch(images) is None:
            raise SizingError(f"{images} images: expected a number, such as 2, or 2:1024x768 with their pixels")
        if self.vision is None:
            raise SizingError(f"{self.source} takes no images, or its processor is not known (docs/images.md)")
        count, *pixels = map(int, re.split("[:x]", images))
        try:
            return count * (self.vision.tokens(*pixels) if pixels else self.vision.most_tokens)
        except ValueError as error:
            raise SizingError(f"images of {images}: {error}") from None

    @classmethod
    def read(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        hub_cache: Path | None = None,
        hub_token: str | None = None,
    ) -> CheckpointSizes:
        """Read a local directory, a hub id or an S3 address.

        Of remote models only config.json, the files beside it and the headers of weight files are downloaded.
        Raises LayoutError for what is no checkpoint, DownloadError for what cannot be read.
        """
        text = str(source)
        if text.lower().endswith(ARCHIVE_SUFFIXES) or is_archive(Path(text)):
            raise LayoutError(
                f"{text} is an archive, which has to be read whole; name the directory that it extracts to"
            )
        if not is_remote(text):
            return cls._read(Path(source), text, None)
        with tempfile.TemporaryDirectory(prefix="djl-trtllm-size-") as scratch:
            hub: dict[str, Any] = {"revision": revision, "hub_token": hub_token}
            path = fetch(text, Path(scratch), lambda line: None, hub_cache=hub_cache, config_only=True, **hub)
            return cls._read(path, text, remote_headers(text, path, **hub))

    @classmethod
    def _read(cls, path: Path, source: str, headers: Mapping[str, Header] | None) -> CheckpointSizes:
        config = read_object(path / "config.json", LayoutError)
        if config is None:
            raise LayoutError(f"{source} has no config.json, which gives the sizes of a model; expected a checkpoint")
        if "builder_config" in config or "build_config" in config:
            raise LayoutError(f"{source} is a compiled engine: its sizes are fixed; expected the checkpoint it is of")
        if headers is None:
            files = find_weights(path)
            headers = {file.name: read_header(file) for file in files if file.suffix == ".safetensors"}
        tensors = tuple(tensor for name, header in headers.items() for tensor in tensors_of(header, name))
        return cls._of(config, source, tensors, path)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config.json") -> CheckpointSizes:
        """Count the parameters that `config` leads to expect."""
        return cls._of(config, source, (), None)

    @classmethod
    def _of(
        cls, config: Mapping[str, Any], source: str, tensors: tuple[WeightTensor, ...], directory: Path | None
    ) -> CheckpointSizes:
        text = text_part(config)
        check_counts(config, source, LayoutError)
        found = tensors or expected_tensors(config)
        shape = ModelShape.from_config(config, parameter_bytes=sum(tensor.bytes for tensor in found))
        return cls(
            shape=shape,
            layers=layer_caches(config),
            parts=parts_of(found, shape.num_layers),
            source=source,
            quantization=stored_quantization(directory, config),
            kv_quantization=stored_kv_quantization(directory, config),
            tied=is_tied(config),
            experts=num_experts(text),
            experts_per_token=experts_per_token(text),
            exact=bool(tensors),
            vision=None if directory is None else Vision.find(directory, config),
        )
