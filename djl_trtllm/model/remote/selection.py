"""Choose the files of a model repository that serving needs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from djl_trtllm.errors import DownloadError
from djl_trtllm.folders import TRUSS_REPOSITORY
from djl_trtllm.model.weights import bounded

_SAFETENSORS = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth")
_FOREIGN = (".msgpack", ".h5", ".ot", ".onnx", ".onnx_data", ".gguf", ".ggml", ".tflite", ".mlmodel", ".pb", ".nemo")
_MEDIA = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".mp4", ".pdf", ".ipynb")
# Copies of the weights in other formats, beside the checkpoint's own.
_COPIES = frozenset({"original", "onnx", "openvino", "coreml", "tf", "flax", "gguf", "metal", "runs", "logs"})
_CONFIGURATION = frozenset(
    {
        "config.json",
        "config.pbtxt",
        "config.yaml",
        "generation_config.json",
        "hf_quant_config.json",
        "serving.properties",
        "tokenizer_config.json",
    }
)
_ENGINE_FOLDERS = frozenset(
    PurePosixPath(folder) for folder in (".", "1", "engine", "tensorrt_llm/1", TRUSS_REPOSITORY / "tensorrt_llm" / "1")
)
"""Where `model.layout` looks for a compiled engine."""
_INDEX = ".index.json"
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def needed(names: Iterable[str]) -> list[str]:
    """The files to download from a repository, given the paths of all its files; sorted.

    All files of a compiled engine. Of a checkpoint, configuration, tokenizer, code and one set of weights: safetensors
    before pickled ones, shards before their consolidated copy. Without other libraries' formats, pictures, hidden files
    and training leftovers.
    """
    paths = sorted({PurePosixPath(name) for name in names if name and not name.endswith("/")})
    kept = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    engines = {path.parent for path in kept if _is_engine(path)}
    chosen = _one_set_of_weights([path for path in kept if path.parent not in engines])
    return sorted(
        str(path) for path in kept if path.parent in engines or (path in chosen and path.suffix not in _MEDIA)
    )


def served_files(names: Iterable[str]) -> list[str]:
    """The same. Raises DownloadError, before gigabytes are downloaded, for an engine that would not be found."""
    names = list(names)
    if nested := nested_engines(names):
        raise DownloadError(
            f"its compiled engine is in folders: {bounded(nested)}; expected config.json, rank0.engine, ... at the "
            "top; move them there, or download the repository and name the engine's folder"
        )
    return needed(names)


def tokenizer_files(names: Iterable[str]) -> list[str]:
    """The files to download for the tokenizer alone: the same without the weights."""
    suffixes = (_SAFETENSORS, *_PICKLED, ".engine")
    weights = (*suffixes, *(f"{suffix}.index.json" for suffix in suffixes))
    return [name for name in needed(names) if not name.endswith(weights)]


def config_files(names: Iterable[str]) -> list[str]:
    """The files that say what a model is and how it is served: small, and without weights or tokenizer."""
    return [name for name in needed(names) if PurePosixPath(name).name in _CONFIGURATION or name.endswith(_INDEX)]


def nested_engines(names: Iterable[str]) -> list[str]:
    """The files of compiled engines in folders that no model is looked for in; sorted.

    None if there is also a model where one is looked for.
    """
    paths = sorted(map(PurePosixPath, names))
    engines = {path.parent for path in paths if _is_engine(path)}
    checkpoint = any(len(path.parts) == 1 and path.suffix in (_SAFETENSORS, *_PICKLED) for path in paths)
    if checkpoint or not _ENGINE_FOLDERS.isdisjoint(engines):
        return []
    return [str(path) for path in paths if path.parent in engines]


def _is_engine(path: PurePosixPath) -> bool:
    return path.suffix == ".engine" or path.name == "openvino_model.xml"


def _one_set_of_weights(paths: list[PurePosixPath]) -> set[PurePosixPath]:
    paths = [
        path
        for path in paths
        if path.suffix not in _FOREIGN and path.name not in _NO_WEIGHTS and not _COPIES & set(path.parts[:-1])
    ]
    top = [path for path in paths if len(path.parts) == 1]
    safetensors = [path for path in top if path.suffix == _SAFETENSORS]
    dropped: set[PurePosixPath] = set()
    if safetensors:
        dropped |= {path for path in paths if path.suffix in _PICKLED or path.name.endswith(".bin.index.json")}
    if any(not path.name.startswith("consolidated") for path in safetensors):
        dropped |= {path for path in top if path.name.startswith("consolidated")}
    return set(paths) - dropped
