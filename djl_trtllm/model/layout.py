"""Identify the kind of model in a directory by its content."""

from __future__ import annotations

import enum
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from djl_trtllm.errors import LayoutError
from djl_trtllm.folders import TRUSS_REPOSITORY
from djl_trtllm.model import tokenizer_conversion, weights
from djl_trtllm.model.json_file import read_object
from djl_trtllm.model.old_engine import OldEngine
from djl_trtllm.model.quantization import stored_quantization
from djl_trtllm.model.remote.selection import nested_engines
from djl_trtllm.model.shape import ModelShape
from djl_trtllm.model.tensor_names import check_tensors

ENGINE_FOLDER = "engine"
"""A folder of this name beside a checkpoint may hold its compiled engine."""

_TOKENIZER_FILES = ("tokenizer.json", *tokenizer_conversion.SOURCES)
_OTHER_TOKENIZER_FILES = ("tokenizer_config.json",)  # a tokenizer written in Python has file names of its own
_RANK_ENGINE = re.compile(r"rank\d+\.engine")
_RANK_WEIGHTS = re.compile(r"rank\d+\.safetensors")
_OPENVINO_MODEL = "openvino_model.xml"
_REPOSITORY_MODEL = "tensorrt_llm"
_MOST_FILES = 10_000
"""That are looked at for what may be meant."""


class ModelKind(enum.Enum):
    """The kinds of model directories; the value is the name in messages."""

    HF_CHECKPOINT = "Hugging Face checkpoint"
    OPENVINO_ENGINE = "compiled OpenVINO engine"
    TENSORRT_ENGINE = "compiled TensorRT-LLM engine"
    TENSORRT_CHECKPOINT = "TensorRT-LLM checkpoint"
    LMI_REPOSITORY = "Triton or LMI model repository with a TensorRT-LLM engine"

    @property
    def is_engine(self) -> bool:
        """Whether it can be loaded without compiling."""
        return self not in (ModelKind.HF_CHECKPOINT, ModelKind.TENSORRT_CHECKPOINT)


_EXPECTED = """expected one of
  - a Hugging Face checkpoint: config.json with `architectures` or `model_type`, and *.safetensors or pytorch_model*.bin
  - a compiled OpenVINO engine: openvino_model.xml and openvino_model.bin
  - a compiled TensorRT-LLM engine: config.json with `build_config`, and rank0.engine, rank1.engine, …
  - a TensorRT-LLM checkpoint: config.json with `architecture` and `dtype`, and rank0.safetensors, …
  - a Triton or LMI model repository: tensorrt_llm/config.pbtxt and tensorrt_llm/1/ with a compiled engine"""


@dataclass(frozen=True)
class Layout:
    kind: ModelKind
    path: Path
    config: dict[str, Any] | None
    """The parsed config.json; of an LMI repository the one beside the engine files. None if there is none."""
    weight_files: tuple[Path, ...]
    """Weights of a checkpoint, or files of an engine, in order of rank or shard."""
    tokenizer_dir: Path | None
    """The directory of the tokenizer files; None if there are none."""
    bundled_engine: Path | None = None
    """The compiled engine in the checkpoint's directory."""
    model_config: dict[str, Any] | None = None
    """config.json of the Hugging Face model that a TensorRT-LLM engine was made from, if it is one level up."""

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model. Reads the headers of a checkpoint's weight files."""
        size = None if self.kind.is_engine else weights.parameter_bytes(self.weight_files)
        shape = ModelShape.from_config(self.config or {}, parameter_bytes=size)
        if (built := self._built_length) is not None:
            # A rotary factor makes the context longer than the number in the checkpoint.
            shape = replace(shape, max_position_embeddings=max(built, shape.max_position_embeddings or 0))
        if self.model_config is None:
            return shape
        # The engine's own config.json has the sizes to use, and no model_type.
        return replace(shape, model_type=ModelShape.from_config(self.model_config).model_type)

    @property
    def _built_length(self) -> int | None:
        """Tokens of the longest sequence that a TensorRT-LLM engine was compiled for."""
        build = (self.config or {}).get("build_config")
        length = build.get("max_seq_len") if isinstance(build, dict) else None
        return length if isinstance(length, int) else None

    @property
    def quantization(self) -> str | None:
        """The algorithm with which the weights are quantised already; None if they are not, or it is unknown.

        See `stored_quantization`. Raises LayoutError for a damaged hf_quant_config.json.
        """
        if self.kind is ModelKind.OPENVINO_ENGINE:
            return None
        return stored_quantization(self.path, self.config or {})

    @property
    def tensor_parallel(self) -> int | None:
        """Number of GPUs that share each layer of a TensorRT-LLM checkpoint or engine; None for other kinds."""
        return self._degree("tp_size")

    @property
    def pipeline_parallel(self) -> int | None:
        """Number of groups of GPUs that share the layers of a TensorRT-LLM checkpoint or engine; None for others."""
        return self._degree("pp_size")

    def _degree(self, name: str) -> int | None:
        if self.kind in (ModelKind.HF_CHECKPOINT, ModelKind.OPENVINO_ENGINE):
            return None
        degree = _mapping(self.config).get(name)
        return degree if isinstance(degree, int) and degree > 0 else 1

    @property
    def engine_dir(self) -> Path | None:
        """The directory of the engine files; None for a checkpoint without a bundled engine."""
        if self.kind is ModelKind.LMI_REPOSITORY:
            return self.weight_files[0].parent
        return self.path if self.kind.is_engine else self.bundled_engine


def inspect(path: Path) -> Layout:
    """Identify the content of the directory `path`.

    Engine files take precedence over checkpoint files: a directory with both is served as the engine. Raises
    `LayoutError` with what was found and what was expected, or with the files that are missing or damaged.
    """
    if not path.is_dir():
        what = "it is a file" if path.exists() else "there is nothing"
        raise LayoutError(
            f"no model directory at {path}: {what}; expected a directory, or a .tar.gz that is opened first"
        )
    names = sorted(entry.name for entry in path.iterdir())
    config = read_object(path / "config.json", LayoutError)
    for reading in (_openvino_engine, _lmi_repository, _tensorrt_engine, _tensorrt_checkpoint, _hf_checkpoint):
        layout = reading(path, names, config)
        if layout is not None:
            return layout
    _refuse_old_engine(path)
    raise LayoutError(_unknown(path, names, config))


def inspect_config(path: Path) -> Layout | None:
    """What the config.json of a Hugging Face checkpoint says of it, without its weights; None for other models.

    Raises `LayoutError` for a damaged config.json.
    """
    config = read_object(path / "config.json", LayoutError)
    if config is None or not _is_hf(config) or _is_built(config):
        return None
    return Layout(ModelKind.HF_CHECKPOINT, path, config, (), _tokenizer_dir(path))


def _openvino_engine(
    path: Path, names: list[str], config: dict[str, Any] | None, above: tuple[Path, ...] = ()
) -> Layout | None:
    if _OPENVINO_MODEL not in names:
        return None
    model, data = path / _OPENVINO_MODEL, path / "openvino_model.bin"
    if not data.is_file():
        raise LayoutError(f"{path} has {_OPENVINO_MODEL} without openvino_model.bin; copy both files of the engine")
    weights.check_whole((model, data))
    above = above or tuple(_model_above(path))
    return Layout(ModelKind.OPENVINO_ENGINE, path, config, (model, data), _tokenizer_dir(path, *above))


def _tensorrt_engine(path: Path, names: list[str], config: dict[str, Any] | None) -> Layout | None:
    if not _is_built(config):
        return None
    engines = _ranked(path, names, _RANK_ENGINE)
    if not engines:
        raise LayoutError(
            f"{path}: config.json is that of a compiled TensorRT-LLM engine, but there is no rank0.engine; "
            f"found {weights.bounded(names)}; copy the whole engine directory"
        )
    _check_ranks(path, engines, config)
    above = _model_above(path)
    return Layout(
        ModelKind.TENSORRT_ENGINE, path, config, engines, _tokenizer_dir(path, *above), model_config=_hf_config(*above)
    )


def _lmi_repository(path: Path, names: list[str], config: dict[str, Any] | None) -> Layout | None:
    # The model's own directory, the repository above it (the path that DJL Serving expects), or a Truss around that.
    for model in (path, path / _REPOSITORY_MODEL, path / TRUSS_REPOSITORY / _REPOSITORY_MODEL):
        if (model / "config.pbtxt").is_file() and (model / "1").is_dir():
            break
    else:
        return None
    engine = model / "1"
    found = sorted(entry.name for entry in engine.iterdir())
    engines = _ranked(engine, found, _RANK_ENGINE)
    engine_config = read_object(engine / "config.json", LayoutError)
    if (openvino := _openvino_engine(engine, found, engine_config, (model, path))) is not None:
        return openvino
    if not engines or not _is_built(engine_config):
        _refuse_old_engine(engine)
        raise LayoutError(
            f"{model} is laid out as a Triton or LMI model repository, but there is no compiled engine in {engine}:"
            f" found {weights.bounded(found) or 'nothing'}; expected config.json with `build_config`, and rank0.engine"
            ", or openvino_model.xml"
        )
    _check_ranks(engine, engines, engine_config)
    return Layout(
        ModelKind.LMI_REPOSITORY,
        path,
        engine_config,
        engines,
        _tokenizer_dir(model, engine, path),
        model_config=_hf_config(model, path),
    )


def _tensorrt_checkpoint(path: Path, names: list[str], config: dict[str, Any] | None) -> Layout | None:
    files = _ranked(path, names, _RANK_WEIGHTS)
    if config is None or not files or not {"architecture", "dtype"} <= config.keys():
        return None
    _check_ranks(path, files, config)
    return Layout(
        ModelKind.TENSORRT_CHECKPOINT,
        path,
        config,
        files,
        _tokenizer_dir(path, *_model_above(path)),
        _bundled_engine(path),
    )


def _hf_checkpoint(path: Path, names: list[str], config: dict[str, Any] | None) -> Layout | None:
    if config is None or not _is_hf(config):
        return None
    files = weights.find_weights(path)
    engine = _bundled_engine(path)
    check_tensors(path, files, ModelShape.from_config(config).num_layers, _extra_layers(config))
    if not files:
        if engine is not None:
            # The config and tokenizer are here and the weights are in the engine: serve the engine.
            return inspect(engine)
        return None
    return Layout(ModelKind.HF_CHECKPOINT, path, config, files, _tokenizer_dir(path), engine)


def _extra_layers(config: dict[str, Any]) -> int:
    """Layers after the others, which predict further tokens (DeepSeek V3, GLM 4.5)."""
    extra = config.get("num_nextn_predict_layers")
    return extra if isinstance(extra, int) else 0


def _refuse_old_engine(path: Path) -> None:
    if (old := OldEngine.find(path)) is not None:
        raise LayoutError(old.refusal)


def _is_built(config: dict[str, Any] | None) -> bool:
    return config is not None and {"pretrained_config", "build_config"} <= config.keys()


def _ranked(path: Path, names: list[str], pattern: re.Pattern[str]) -> tuple[Path, ...]:
    found = [name for name in names if pattern.fullmatch(name)]
    return tuple(path / name for name in sorted(found, key=_rank))


def _rank(name: str) -> int:
    return int(name.rpartition("rank")[2].split(".")[0])


def _check_ranks(path: Path, files: tuple[Path, ...], config: dict[str, Any] | None) -> None:
    """Check that the files are whole, and that there is one for each rank."""
    weights.check_whole(files)
    world = _mapping(config).get("world_size")
    present = [_rank(file.name) for file in files]
    wanted = world if isinstance(world, int) and world > 0 else max(present) + 1
    missing = sorted(set(range(wanted)) - set(present))
    if missing:
        raise LayoutError(
            f"{path}: files of {len(missing)} of {wanted} ranks are missing: "
            f"{weights.bounded([f'rank {rank}' for rank in missing])}; "
            f"found {weights.bounded([file.name for file in files])}; copy the files of all ranks"
        )


def _mapping(config: dict[str, Any] | None) -> dict[str, Any]:
    """How config.json spreads a TensorRT-LLM checkpoint or engine over GPUs."""
    inner = (config or {}).get("pretrained_config", config or {})
    mapping = inner.get("mapping") if isinstance(inner, dict) else None
    return mapping if isinstance(mapping, dict) else {}


def _hf_config(*candidates: Path) -> dict[str, Any] | None:
    for candidate in candidates:
        config = read_object(candidate / "config.json", LayoutError)
        if config is not None and _is_hf(config):
            return config
    return None


def _is_hf(config: dict[str, Any]) -> bool:
    return "architectures" in config or "model_type" in config


def _tokenizer_dir(*candidates: Path) -> Path | None:
    for names in (_TOKENIZER_FILES, _OTHER_TOKENIZER_FILES):
        for candidate in candidates:
            if any(any(candidate.glob(name)) for name in names):
                return candidate
    return None


def _model_above(path: Path) -> list[Path]:
    """The directory above an engine, if it is a model's own: many engines have no tokenizer beside them."""
    return [path.parent] if (path.parent / "config.json").is_file() else []


def _bundled_engine(path: Path) -> Path | None:
    """The `engine` folder in a checkpoint's directory, if it is a compiled engine."""
    engine = path / ENGINE_FOLDER
    if (engine / _OPENVINO_MODEL).is_file() or _is_built(read_object(engine / "config.json", LayoutError)):
        return engine
    return None


def _files_below(path: Path) -> list[str]:
    files = (file.relative_to(path).as_posix() for file in path.rglob("*"))
    return list(itertools.islice(files, _MOST_FILES))


def _unknown(path: Path, names: list[str], config: dict[str, Any] | None) -> str:
    shown = [name + "/" if (path / name).is_dir() else name for name in names]
    lines = [f"{path} is not a model that can be served: found {weights.bounded(shown) or 'nothing, it is empty'};"]
    if config is None and any(name.endswith((".safetensors", ".bin", ".engine")) for name in names):
        lines[0] += " there are weights or engines without a config.json;"
    elif config is not None and not ({"architectures", "model_type", "architecture", "build_config"} & config.keys()):
        lines[0] += f" config.json has neither (its keys: {weights.bounded(sorted(config))});"
    elif config is not None:
        lines[0] += " there is a config.json without weights beside it;"
    elif "serving.properties" in names:
        lines[0] += " with serving.properties alone, option.model_id must name the model;"
    below = [name for name in names if any((path / name / mark).is_file() for mark in ("config.json", _OPENVINO_MODEL))]
    if below:
        lines[0] += f" there may be a model in {weights.bounded([name + '/' for name in below])}: name that directory;"
    elif nested := nested_engines(_files_below(path)):
        lines[0] += f" a compiled engine is further down ({weights.bounded(nested)}): name its directory;"
    return "\n".join([*lines, _EXPECTED])
