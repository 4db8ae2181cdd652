"""Identify the kind of model in a directory by its content, and install its requirements.txt where that is allowed."""

import enum
import importlib.util
import itertools
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from djl_trtllm.config.compat import triton
from djl_trtllm.config.compat.truss import TRUSS_REPOSITORY
from djl_trtllm.errors import LayoutError, ModelError
from djl_trtllm.model import checkpoint, tokenizer_formats
from djl_trtllm.model.checkpoint import ModelShape, check_tensors, part, read_object, stored_quantization
from djl_trtllm.model.remote.fetch import nested_engines

_OLD_FILE = re.compile(r".+_rank\d+\.engine")


def old_engine(directory: Path) -> str | None:
    """The message about an engine in this directory that no TensorRT-LLM from 0.8 on reads, None if there is none.

    Early LMI repositories hold such files (LMI document, Model Artifacts Structure), with names such as
    `trt_llm_model_float16_tp2_rank0.engine`, or a config.json with `builder_config`. Raises LayoutError for a damaged
    config.json.
    """
    files = sorted(path.name for path in directory.glob("*.engine"))
    config = read_object(directory / "config.json", LayoutError) or {}
    named = [name for name in files if _OLD_FILE.fullmatch(name)]
    if not named and not (files and isinstance(config.get("builder_config"), dict)):
        return None
    return (
        f"{directory} holds an engine of TensorRT-LLM before 0.8 ({[*named, *files][0]}; LMI containers 0.25 and 0.26 "
        "write such files), and no later one reads it: serve it with the container that compiled it, or compile the "
        "Hugging Face checkpoint again with `djl-trtllm compile CHECKPOINT OUT`"
    )


ENGINE_FOLDER = "engine"
"""A folder of this name beside a checkpoint may hold its compiled engine."""

_TOKENIZER_FILES = ("tokenizer.json", *tokenizer_formats.SOURCES)
_OTHER_TOKENIZER_FILES = ("tokenizer_config.json",)  # a tokenizer written in Python has file names of its own
_RANK_ENGINE = re.compile(r"rank\d{1,5}\.engine")
_RANK_WEIGHTS = re.compile(r"rank\d{1,5}\.safetensors")
_OPENVINO_MODELS = ("openvino_model.xml", "openvino_language_model.xml")
"""The file of the language model. A model that takes images has the second one, and files of its other parts."""
_OPENVINO_PART = re.compile(r"openvino_\w*model\.xml")
_REPOSITORY_MODEL = "tensorrt_llm"
_MOST_FILES = 10_000
"""The most files that are looked at to find an engine that the user may have meant."""


class ModelKind(enum.Enum):
    """The kinds of model directories; the value is the name in messages."""

    HF_CHECKPOINT = "Hugging Face checkpoint"
    OPENVINO_ENGINE = "compiled OpenVINO engine"
    TENSORRT_ENGINE = "compiled TensorRT-LLM engine"
    TENSORRT_CHECKPOINT = "TensorRT-LLM checkpoint"
    LMI_REPOSITORY = "Triton or LMI model repository with a TensorRT-LLM engine"

    @property
    def is_engine(self) -> bool:
        """Return whether it can be loaded without compiling."""
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
    """The parsed config.json; that of an LMI repository is beside the engine files. None if there is none."""
    weight_files: tuple[Path, ...]
    """Weights of a checkpoint, or files of an engine, in order of rank or shard."""
    tokenizer_dir: Path | None
    """The directory of the tokenizer files; None if there are none."""
    bundled_engine: Path | None = None
    """The compiled engine in the checkpoint's directory."""
    model_config: dict[str, Any] | None = None
    """config.json of the Hugging Face model that a TensorRT-LLM engine was made from, if it is one level up."""
    draft: "Layout | None" = None
    """The draft model that proposes tokens to this one."""

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the model. The first use reads the headers of a checkpoint's weight files."""
        size = None if self.kind.is_engine else checkpoint.parameter_bytes(self.weight_files)
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
        length = part(self.config or {}, "build_config").get("max_seq_len")
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
    """Return the layout of a Hugging Face checkpoint by its config.json, without its weights; None for other models.

    Raises `LayoutError` for a damaged config.json.
    """
    config = read_object(path / "config.json", LayoutError)
    if config is None or not _is_hf(config) or _is_built(config):
        return None
    return Layout(ModelKind.HF_CHECKPOINT, path, config, (), _tokenizer_dir(path))


def _openvino_engine(
    path: Path, names: list[str], config: dict[str, Any] | None, above: tuple[Path, ...] = ()
) -> Layout | None:
    if not set(_OPENVINO_MODELS) & set(names):
        return None
    parts = [path / name for name in names if _OPENVINO_PART.fullmatch(name)]
    for model in parts:
        if not model.with_suffix(".bin").is_file():
            raise LayoutError(f"{path} has {model.name} without {model.stem}.bin; copy all files of the engine")
    files = tuple(file for model in parts for file in (model, model.with_suffix(".bin")))
    checkpoint.check_whole(files)
    above = above or tuple(_model_above(path))
    return Layout(ModelKind.OPENVINO_ENGINE, path, config, files, _tokenizer_dir(path, *above))


def _tensorrt_engine(path: Path, names: list[str], config: dict[str, Any] | None) -> Layout | None:
    if not _is_built(config):
        return None
    engines = _ranked(path, names, _RANK_ENGINE)
    if not engines:
        raise LayoutError(
            f"{path}: config.json is that of a compiled TensorRT-LLM engine, but there is no rank0.engine; "
            f"found {checkpoint.bounded(names)}; copy the whole engine directory"
        )
    _check_ranks(path, engines, config)
    above = _model_above(path)
    return Layout(
        ModelKind.TENSORRT_ENGINE, path, config, engines, _tokenizer_dir(path, *above), model_config=_hf_config(*above)
    )


def _lmi_repository(path: Path, names: list[str], config: dict[str, Any] | None) -> Layout | None:
    # The model's own directory, the repository above it (the path that DJL Serving expects), or a Truss around that.
    for model in (path, path / _REPOSITORY_MODEL, path / TRUSS_REPOSITORY / _REPOSITORY_MODEL):
        config_file = model / triton.CONFIG_FILE
        if config_file.is_file() and (engine := triton.version_folder(config_file)) is not None:
            break
    else:
        return None
    found = sorted(entry.name for entry in engine.iterdir())
    engines = _ranked(engine, found, _RANK_ENGINE)
    engine_config = read_object(engine / "config.json", LayoutError)
    if (openvino := _openvino_engine(engine, found, engine_config, (model, path))) is not None:
        return openvino
    if not engines or not _is_built(engine_config):
        _refuse_old_engine(engine)
        raise LayoutError(
            f"{model} is laid out as a Triton or LMI model repository, but there is no compiled engine in {engine}: "
            f"found {checkpoint.bounded(found) or 'nothing'}; expected config.json with `build_config`, and "
            "rank0.engine, or openvino_model.xml"
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
    files = checkpoint.find_weights(path)
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
    if (refusal := old_engine(path)) is not None:
        raise LayoutError(refusal)


def _is_built(config: dict[str, Any] | None) -> bool:
    return config is not None and {"pretrained_config", "build_config"} <= config.keys()


def _ranked(path: Path, names: list[str], pattern: re.Pattern[str]) -> tuple[Path, ...]:
    found = [name for name in names if pattern.fullmatch(name)]
    return tuple(path / name for name in sorted(found, key=_rank))


def _rank(name: str) -> int:
    return int(name.rpartition("rank")[2].split(".")[0])


def _check_ranks(path: Path, files: tuple[Path, ...], config: dict[str, Any] | None) -> None:
    """Check that the files are whole, and that there is one for each rank."""
    checkpoint.check_whole(files)
    world = _mapping(config).get("world_size")
    present = [_rank(file.name) for file in files]
    wanted = world if isinstance(world, int) and world > 0 else max(present) + 1
    missing = sorted(set(range(wanted)) - set(present))
    if missing:
        raise LayoutError(
            f"{path}: files of {len(missing)} of {wanted} ranks are missing: "
            f"{checkpoint.bounded([f'rank {rank}' for rank in missing])}; "
            f"found {checkpoint.bounded([file.name for file in files])}; copy the files of all ranks"
        )


def _mapping(config: dict[str, Any] | None) -> Mapping[str, Any]:
    """How config.json spreads a TensorRT-LLM checkpoint or engine over GPUs."""
    config = config or {}
    return part(part(config, "pretrained_config") if "pretrained_config" in config else config, "mapping")


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
    """The directory above an engine, if it is the model's own: many engines have no tokenizer beside them."""
    return [path.parent] if (path.parent / "config.json").is_file() else []


def _bundled_engine(path: Path) -> Path | None:
    """The `engine` folder in a checkpoint's directory, if it is a compiled engine."""
    engine = path / ENGINE_FOLDER
    if any((engine / name).is_file() for name in _OPENVINO_MODELS):
        return engine
    return engine if _is_built(read_object(engine / "config.json", LayoutError)) else None


def _files_below(path: Path) -> list[str]:
    files = (file.relative_to(path).as_posix() for file in path.rglob("*"))
    return list(itertools.islice(files, _MOST_FILES))


def _unknown(path: Path, names: list[str], config: dict[str, Any] | None) -> str:
    if not names:
        return f"{path} is empty: copy a checkpoint or a compiled engine there, or name another directory"
    shown = [name + "/" if (path / name).is_dir() else name for name in names]
    lines = [f"{path} is not a model that can be served: found {checkpoint.bounded(shown)};"]
    if config is None and any(name.endswith((".safetensors", ".bin", ".engine")) for name in names):
        lines[0] += " there are weights or engines without a config.json;"
    elif config is not None and not ({"architectures", "model_type", "architecture", "build_config"} & config.keys()):
        lines[0] += f" config.json has neither (its keys: {checkpoint.bounded(sorted(config))});"
    elif config is not None:
        lines[0] += " there is a config.json without weights beside it;"
    elif "serving.properties" in names:
        lines[0] += " with serving.properties alone, option.model_id must name the model;"
    marks = ("config.json", *_OPENVINO_MODELS)
    below = [name for name in names if any((path / name / mark).is_file() for mark in marks)]
    if below:
        lines[0] += (
            f" there may be a model in {checkpoint.bounded([name + '/' for name in below])}: name that directory;"
        )
    elif nested := nested_engines(_files_below(path)):
        lines[0] += f" a compiled engine is further down ({checkpoint.bounded(nested)}): name its directory;"
    return "\n".join([*lines, _EXPECTED])


# -- requirements.txt --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

SWITCH = "SERVING_INSTALL_REQUIREMENTS"
TIMEOUT = 1800.0
"""Time limit of an installation, in seconds."""


def handle_requirements(model_dir: Path, allowed: bool) -> None:
    """Install the `requirements.txt` of a model directory into this Python, if it exists and is `allowed`.

    If it is not allowed, log that once. Raises `ModelError` with the installer's last lines if it fails.
    """
    file = model_dir / "requirements.txt"
    if not file.is_file():
        return
    if not allowed:
        logger.warning(
            "%s is not installed: packages run code on installation and import. Set %s=true to install them",
            file, SWITCH,
        )  # fmt: skip
        return
    command = _installer(file)
    logger.info("installing %s", file)
    try:
        done = subprocess.run(
            command,
            cwd=model_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"installing {file} took longer than {TIMEOUT:.0f} s; install the packages beforehand"
        ) from error
    if done.returncode != 0:
        tail = "\n".join(f"  | {line}" for line in done.stdout.splitlines()[-15:])
        raise ModelError(
            f"installing {file} failed (exit status {done.returncode}); correct it, or unset {SWITCH}. "
            f"Last lines of the installer:\n{tail}"
        )
    importlib.invalidate_caches()


def _installer(file: Path) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "-r", str(file)]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "-r", str(file)]
    raise ModelError(
        f"{file} cannot be installed: this Python ({sys.executable}) has no pip, and there is no uv on PATH"
    )
