"""Read what a checkpoint is from its headers: weight files, tensor names, quantisation, sizes.

Errors name the file, what is wrong with it and what to do.
"""

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from djl_trtllm.config.options.option import MOST_GPUS
from djl_trtllm.errors import LayoutError, ModelError
from djl_trtllm.files import MOST_JSON_BYTES, open_file, read_file

_LFS = b"version https://git-lfs"
_MOST_VALUES = 250_000
_MOST_VALUES_OF_TENSORS = 1_000_000
"""The most values of an index or a header. Reading JSON holds the GIL: about a second for a million short keys."""
_MOST_TENSORS = 1_000_000
_MOST_INDEX_BYTES = 1 << 26
"""The most bytes of an index. The largest models have 300,000 tensors, each with a line of 100 bytes."""


def read_object(file: Path, error: type[ModelError]) -> dict[str, Any] | None:
    """The JSON object in `file`, or None if there is no such file. Raises `error` for anything else."""
    if not file.exists():
        return None
    value = read_json(file, error)
    if not isinstance(value, dict):
        raise error(f"{file} holds a JSON {type(value).__name__}, expected an object; copy it from the model again")
    check_counts(value, file, error)
    return value


def read_json(file: Path, error: type[ModelError]) -> Any:
    """The JSON in `file`. Raises `error`."""
    of_tensors = file.name in INDEXES
    content = content_of(file, _MOST_INDEX_BYTES if of_tensors else MOST_JSON_BYTES, error)
    if content.startswith(_LFS):
        raise error(f"{file}: this is a Git LFS pointer, not the file; fetch the files with `git lfs pull`")
    try:
        return parse_json(content, _MOST_VALUES_OF_TENSORS if of_tensors else _MOST_VALUES)
    except (ValueError, RecursionError) as cause:
        raise error(f"{file} is not valid JSON: {cause}; copy it from the model again") from cause


def content_of(file: Path, most: int, error: type[ModelError]) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises `error`."""
    try:
        return read_file(file, most)
    except OSError as cause:
        raise error(f"{file} cannot be read: {cause.strerror}; copy it from the model again") from cause


def parse_json(content: bytes, most: int) -> Any:
    """The value in JSON of at most `most` values. Raises ValueError and RecursionError."""
    check_values(content, most)
    return json.loads(content.decode("utf-8-sig"))


def check_values(content: bytes, most: int) -> None:
    """Raise ValueError for JSON of too many values: each takes up to forty times the memory of its text."""
    if sum(map(content.count, (b",", b"[", b"{"))) > most:
        raise ValueError(f"it has more than {most:,} values")


def check_counts(config: Mapping[str, Any], file: object, error: type[ModelError]) -> None:
    """Raise `error` if a number in `config` is larger than in any model: memory is allocated by these numbers."""
    for key, value in config.items():
        members = value if isinstance(value, list) else [value]
        most = _MOST.get(key, _MOST_OF_ANYTHING)
        for number in [len(members)] if key in _LISTS else members:
            if isinstance(number, dict):
                check_counts(number, file, error)
            elif isinstance(number, int) and number > most:
                raise error(f"{file}: {key} is {number}, expected at most {most}; copy it from the model again")


def is_lfs_pointer(file: Path) -> bool:
    """Return whether `file` is the pointer that Git LFS leaves in place of a file that was not fetched."""
    if file.stat().st_size > 1024:
        return False
    with open_file(file) as stream:
        return stream.read(len(_LFS)) == _LFS


# -- weight files ------------------------------------------------------------------------------------------------------

MOST_HEADER_BYTES = 1 << 25
"""The most bytes of a header: that of 200,000 tensors. The safetensors library refuses headers above 100 MB."""
_FIRST_BYTES = 256 * 1024
"""Bytes of the first read of a file, enough for the header of most files."""

_LONGEST_SHOWN = 200
"""The most characters of a tensor's name in a message."""
_MOST_SHARDS = 10_000
_SHARD = re.compile(r"(?P<start>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})(?P<end>\..+)")

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# An adapter, or a second copy of the weights in another library's format.
_OTHERS = ("adapter_model", "consolidated")


def find_weights(path: Path) -> tuple[Path, ...]:
    """The weight files of a Hugging Face checkpoint: safetensors if there are any, else PyTorch's; may be empty.

    Raises `LayoutError` if an index names missing files, and for Git LFS pointers and truncated files.
    """
    for index, pattern in zip(INDEXES, ("*.safetensors", "pytorch_model*.bin"), strict=True):
        if (path / index).is_file():
            files = _indexed(path / index)
        else:
            files = tuple(sorted(file for file in path.glob(pattern) if not file.name.startswith(_OTHERS)))
            _check_shards(path, files)
        if files:
            check_whole(files)
            return files
    return ()


def check_whole(files: tuple[Path, ...]) -> None:
    """Raise `LayoutError` for files that are empty, truncated, unreadable, or Git LFS pointers."""
    try:
        _check_whole(files)
    except OSError as error:
        raise LayoutError(f"{error.filename} cannot be read: {error.strerror}; download or copy it again") from error


def _check_whole(files: tuple[Path, ...]) -> None:
    pointers = [file.name for file in files if is_lfs_pointer(file)]
    if pointers:
        raise LayoutError(
            f"{files[0].parent}: {bounded(pointers)}: these are Git LFS pointers, not the files; fetch the files "
            "with `git lfs pull`, or download the model with `hf download`"
        )
    for file in files:
        if file.suffix == ".safetensors":
            read_header(file)
        elif file.stat().st_size == 0:
            raise LayoutError(f"{file} is empty; download or copy it again")
        elif file.suffix == ".bin" and _is_cut_zip(file):
            raise LayoutError(
                f"{file} is truncated: {file.stat().st_size:,} bytes of a PyTorch file without its end; download or "
                "copy it again"
            )


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a safetensors file: its type, its sizes, and its begin and end behind the header, in bytes."""

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**48)], ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(lt=2**62)]]

    def __post_init__(self) -> None:
        if self.data_offsets[0] > self.data_offsets[1]:
            raise ValueError(f"it begins at {self.data_offsets[0]} and ends at {self.data_offsets[1]}")


Header: TypeAlias = Mapping[str, StoredTensor]
"""The tensors of a file by name."""


def read_header(file: Path) -> Header:
    """The header of a safetensors file on this disk; see `parse_header`."""
    with open_file(file) as stream:

        def get(start: int, end: int) -> bytes:
            stream.seek(start)
            return stream.read(end - start)

        return parse_header(file, file.stat().st_size, get)


def parse_header(
    where: object,
    size: int,
    get: Callable[[int, int], bytes],
    error: type[ModelError] = LayoutError,
    remedy: str = "download or copy it again",
) -> Header:
    """The header of a safetensors file without its metadata.

    `get` returns the bytes of the file, which has `size`, from a start to an end. Raises `error` if the file is
    truncated or not a safetensors file. Format: https://github.com/huggingface/safetensors#format
    """
    content = get(0, min(_FIRST_BYTES, size)) if size else b""
    length = int.from_bytes(content[:8], "little")
    if size < 8 or length > MOST_HEADER_BYTES:
        raise error(f"{where} is not a safetensors file ({size:,} bytes); {remedy}")
    if 8 + length > size:
        raise error(f"{where} is truncated: {size:,} bytes, the header alone has {8 + length:,}; {remedy}")
    if len(content) < 8 + length:
        content += get(len(content), 8 + length)
    try:
        entries = parse_json(content[8 : 8 + length], _MOST_VALUES_OF_TENSORS)
        entries.pop("__metadata__", None)
        header = {name: _stored(name, entry) for name, entry in entries.items()}
        end = max((tensor.data_offsets[1] for tensor in header.values()), default=0)
    except (ValueError, AttributeError, TypeError, RecursionError) as cause:
        raise error(f"{where} has a damaged header ({cause}); {remedy}") from cause
    if 8 + length + end > size:
        raise error(f"{where} is truncated: {size:,} bytes, the tensors end at {8 + length + end:,}; {remedy}")
    return header


def _stored(name: str, entry: object) -> StoredTensor:
    try:
        return msgspec.convert(entry, StoredTensor)
    except msgspec.ValidationError as error:
        # A name may have all of the header's megabytes.
        raise ValueError(f"{name[:_LONGEST_SHOWN]!r}: {error}") from None


def _is_cut_zip(file: Path) -> bool:
    # PyTorch's files are zip archives, with the directory at the end; older ones are pickles, which have no mark.
    with open_file(file) as stream:
        starts = stream.read(4) == b"PK\x03\x04"
    return starts and not zipfile.is_zipfile(file)


def parameter_bytes(files: tuple[Path, ...]) -> int | None:
    """Bytes of all tensors in `files`; for formats other than safetensors the file sizes. None without files."""
    if not files:
        return None
    total = 0
    for file in files:
        if file.suffix == ".safetensors":
            total += sum(end - start for start, end in (each.data_offsets for each in read_header(file).values()))
        else:
            total += file.stat().st_size
    return total


def bounded(names: list[str], limit: int = 20) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _indexed(index: Path) -> tuple[Path, ...]:
    weight_map = (read_object(index, LayoutError) or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        raise LayoutError(
            f"{index} has no `weight_map` object, which names the weight files; copy it from the model again"
        )
    shards = sorted({str(name) for name in weight_map.values()})
    if any(Path(shard).name != shard for shard in shards):
        raise LayoutError(f"{index} names weight files outside its own directory; expected plain file names")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise LayoutError(
            f"{index.parent}: {len(missing)} of {len(shards)} weight files named in {index.name} are missing: "
            f"{bounded(missing)}; download or copy them"
        )
    return tuple(index.parent / shard for shard in shards)


def _check_shards(path: Path, files: tuple[Path, ...]) -> None:
    """Without an index, check by file names (`model-00001-of-00003.safetensors`) that no shard is missing."""
    present = {file.name for file in files}
    sets = {
        (match["start"], len(match["number"]), match["count"], match["end"])
        for name in present
        if (match := _SHARD.fullmatch(name))
    }
    if (count := sum(int(digits) for _, _, digits, _ in sets)) > _MOST_SHARDS:
        raise LayoutError(
            f"{path}: its weight files are named as parts of {count}, expected at most {_MOST_SHARDS} files; copy the "
            "model again"
        )
    wanted = {
        f"{start}-{number:0{width}d}-of-{digits}{end}"
        for start, width, digits, end in sets
        for number in range(1, int(digits) + 1)
    }
    missing = sorted(wanted - present)
    if missing:
        raise LayoutError(
            f"{path}: {len(missing)} of {len(wanted)} weight files are missing: {bounded(missing)}; copy them"
        )


# -- tensor names ------------------------------------------------------------------------------------------------------

# `model.layers.7.mlp.up_proj.weight`, `transformer.h.7.ln_1.weight`, `h.7.ln_1.weight`
_IN_LAYER = re.compile(r"(?P<stack>(?:.*?\.)??(?:layers|layer|h|blocks|block))\.(?P<index>\d{1,9})\.(?P<rest>.+)")


def check_tensors(path: Path, files: tuple[Path, ...], num_layers: int | None, extra_layers: int = 0) -> None:
    """Check the tensors of a Hugging Face checkpoint's safetensors files.

    `num_layers` is the number of layers in config.json; `extra_layers` may follow them (layers that predict several
    tokens). Raises `LayoutError` if the index names tensors that its files do not have, if a layer has no tensors, or
    if there are more layers of the same kind than config.json says.
    """
    if not files or any(file.suffix != ".safetensors" for file in files):
        return
    tensors: dict[str, set[str]] = {}
    count = 0
    for file in files:
        tensors[file.name] = set(read_header(file))
        count += len(tensors[file.name])
        if count > _MOST_TENSORS:
            raise LayoutError(
                f"{path}: its weight files have more than {_MOST_TENSORS:,} tensors; copy the model again"
            )
    _check_index(path, tensors)
    if num_layers is not None:
        _check_layers(path, set().union(*tensors.values()), num_layers, extra_layers)


def _check_index(path: Path, tensors: Mapping[str, set[str]]) -> None:
    index = path / INDEXES[0]
    weight_map = (read_object(index, LayoutError) or {}).get("weight_map", {})
    missing = sorted(name for name, file in weight_map.items() if name not in tensors[str(file)])
    if missing:
        shown = [f"{name} in {weight_map[name]}" for name in missing]
        raise LayoutError(
            f"{path}: {len(missing)} of {len(weight_map)} tensors named in {index.name} are not in their files: "
            f"{bounded(shown, 5)}; the files are of another checkpoint than the index: download or copy all of them "
            "again"
        )


def _check_layers(path: Path, names: set[str], num_layers: int, extra_layers: int) -> None:
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if match := _IN_LAYER.fullmatch(name):
            stacks[match["stack"]][int(match["index"])].add(match["rest"])
    wanted = set(range(num_layers))
    if not stacks or any(stack.keys() == wanted for stack in stacks.values()):
        return
    if not any(stack.keys() >= wanted for stack in stacks.values()):
        name, stack = max(stacks.items(), key=lambda item: len(item[1].keys() & wanted))
        missing = sorted(wanted - stack.keys())
        raise LayoutError(
            f"{path}: config.json says {num_layers} layers, and the weight files have no tensors of "
            f"{len(missing)} of them: {bounded([f'{name}.{index}' for index in missing], 5)}; download or copy the "
            "checkpoint again, with the config.json that belongs to it"
        )
    if len(stacks) == 1:
        ((name, stack),) = stacks.items()
        further = sorted(
            index for index in stack if index >= num_layers + extra_layers and stack[index] == stack[num_layers - 1]
        )
        if further:
            raise LayoutError(
                f"{path}: config.json says {num_layers} layers, and the weight files have {len(further)} more: "
                f"{bounded([f'{name}.{index}' for index in further], 5)}; use the config.json that belongs to the "
                "checkpoint"
            )


# -- quantisation ------------------------------------------------------------------------------------------------------

MODELOPT_FILE = "hf_quant_config.json"
"""The file that NVIDIA's ModelOpt writes beside the config.json of a Hugging Face checkpoint that it quantised."""

_ALGORITHM_OF = {"mxfp4": "W4A16_MXFP4", "nvfp4": "NVFP4", "awq": "W4A16_AWQ"}


def stored_quantization(directory: Path | None, config: Mapping[str, Any]) -> str | None:
    """The quantisation of a checkpoint or engine with this config.json, as a name of TensorRT-LLM's QuantAlgo.

    Reads `quantization` of TensorRT-LLM's own files, ModelOpt's hf_quant_config.json, or Hugging Face's
    `quantization_config`; a method without a name in TensorRT-LLM keeps the file's name (bitsandbytes). None if nothing
    is quantised. Without `directory` only `config` counts. Raises LayoutError for a damaged hf_quant_config.json.
    """
    algorithm = _named(directory, config, "quant_algo")
    if algorithm is not None:
        return None if algorithm == "NO_QUANT" else algorithm
    return _of_method(_of_hugging_face(config))


def stored_kv_quantization(directory: Path | None, config: Mapping[str, Any]) -> str | None:
    """The quantisation of the KV cache that a checkpoint was made for, by the same files; None if there is none."""
    return _named(directory, config, "kv_cache_quant_algo")


def _named(directory: Path | None, config: Mapping[str, Any], key: str) -> str | None:
    own = part(part(config, "pretrained_config") or config, "quantization")
    modelopt = {} if directory is None else _of_modelopt(directory)
    hugging_face = _of_hugging_face(config)
    parts = (own, modelopt, hugging_face, part(hugging_face, "quantization"))
    return next((value for each in parts if isinstance(value := each.get(key), str) and value), None)


def hugging_face_quantization(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`quantization_config` of a Hugging Face config.json; empty if there is none, or ModelOpt's file counts.

    Raises LayoutError for a damaged hf_quant_config.json.
    """
    return {} if _of_modelopt(directory) else _of_hugging_face(config)


def _of_modelopt(directory: Path) -> Mapping[str, Any]:
    return part(read_object(directory / MODELOPT_FILE, LayoutError) or {}, "quantization")


def _of_hugging_face(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return part(config, "quantization_config") or part(part(config, "text_config"), "quantization_config")


def _of_method(config: Mapping[str, Any]) -> str | None:
    method = config.get("quant_method")
    if not isinstance(method, str) or not method:
        return None
    if method == "fp8":
        return "FP8" if config.get("weight_block_size") is None else "FP8_BLOCK_SCALES"
    if method == "gptq":
        return f"W{config.get('bits', 4)}A16_GPTQ"
    return _ALGORITHM_OF.get(method, method)


def part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under this key of a config.json; an empty one if the key is missing or holds something else."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


# -- sizes -------------------------------------------------------------------------------------------------------------

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

_LISTS = ("layers_block_type", "attn_layer_indices", "kda_layers", "mlp_only_layers")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json for the number of experts in a layer."""
_GPUS = ("world_size", "tp_size", "pp_size", "cp_size", "moe_tp_size", "moe_ep_size")
_INT32 = 2**31 - 1
_MOST_OF_ANYTHING = 2**128
"""The largest number that any key may have. A tokenizer may write 10^30 for a length without a limit."""
_MOST: Mapping[str, int] = {
    **dict.fromkeys((*_HEADS, *_KV_HEADS, *_HIDDEN, *_VOCAB, *_INTERMEDIATE, "r"), _INT32),
    **dict.fromkeys(EXPERTS, 65_536),
    **dict.fromkeys((*_LAYERS, *_LISTS, "num_nextn_predict_layers"), 10_000),
    **dict.fromkeys(_GPUS, MOST_GPUS),
}
"""The largest plausible number for each key of config.json. The deepest models have a few hundred layers."""


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
    """The number format in config.json without `torch.`, for example `bfloat16`."""
    parameter_bytes: int | None = None
    """Stored size of all weights in bytes, from the headers of the weight files."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, parameter_bytes: int | None = None) -> "ModelShape":
        """Read the config.json of a Hugging Face checkpoint, TensorRT-LLM checkpoint or TensorRT-LLM engine.

        Models with several parts (`text_config`, `llm_config`, …) are described by their text part.
        """
        text = text_part(config)
        architectures = config.get("architectures")
        listed = architectures if isinstance(architectures, list) else []
        architecture = listed[0] if listed else text.get("architecture")
        model_type = text.get("model_type") or config.get("model_type")
        heads = first_positive(text, _HEADS)
        hidden = first_positive(text, _HIDDEN)
        head_dim = first_positive(text, ("head_dim", "head_size", "kv_channels", "attention_head_dim"))
        if head_dim is None and hidden and heads:
            head_dim = hidden // heads or None
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
        return cls(
            num_layers=first_positive(text, _LAYERS) or _listed_layers(text),
            num_heads=heads,
            num_kv_heads=_kv_heads(text, heads),
            head_dim=head_dim,
            hidden=hidden,
            intermediate=first_positive(text, _INTERMEDIATE),
            vocab_size=first_positive(text, _VOCAB) or first_positive(config, _VOCAB),
            max_position_embeddings=_positions(text),
            architecture=architecture if isinstance(architecture, str) else None,
            model_type=model_type if isinstance(model_type, str) else None,
            dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
            parameter_bytes=parameter_bytes,
        )


def _listed_layers(text: Mapping[str, Any]) -> int | None:
    """The number of layers of a hybrid model whose config.json lists the kind of each layer (Nemotron 3 Ultra)."""
    listed = text.get("layers_block_type")
    return len(listed) or None if isinstance(listed, list) else None


def _positions(text: Mapping[str, Any]) -> int | None:
    """The longest sequence. As in TensorRT-LLM (builder.py, 1.2), linear and dynamic scaling stretch it."""
    positions = first_positive(text, _POSITIONS)
    if positions is None:
        return None
    positions = min(positions, _INT32)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or text.get("rotary_scaling")
    if not isinstance(scaling, dict):
        return positions
    factor = scaling.get("factor")
    stretches = scaling.get("type", scaling.get("rope_type")) in ("linear", "dynamic")
    if not stretches or not isinstance(factor, int | float) or not factor > 1:
        return positions
    return int(min(positions * min(factor, _INT32), _INT32))  # a factor may be infinite, or have any number of digits


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model; of most models, the whole."""
    for key in ("pretrained_config", "builder_config", "text_config", "llm_config", "language_config"):
        if inner := part(config, key):
            return text_part(inner)
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
            return first_positive(text, ("n_head_kv",))
        return 1 if text.get("multi_query", True) else heads
    found = first_positive(text, _KV_HEADS)
    if found is not None:
        return found
    if found := first_positive(part(text, "attn_config"), ("kv_n_heads",)):  # MPT, DBRX
        return found
    multi_query = text.get("multi_query", text.get("model_type") == "gpt_bigcode")
    return 1 if multi_query is True else heads


def first_positive(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of these keys that has a whole number above 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
