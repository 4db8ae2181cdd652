"""A checkpoint's identity, computed from its content."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from djl_trtllm.engines.file_hashes import FileHashes
from djl_trtllm.errors import ModelError

_MOST_THREADS = 8
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "*.pt", "*.pth")
_CONFIG_AND_TOKENIZER = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.json",
    "*.jinja",
)


def checkpoint_identity(checkpoint: Path, tokenizer_dir: Path | None = None, hashes: FileHashes | None = None) -> str:
    """`sha256:...` over the sorted (name, size, sha256) of a checkpoint's config, weight and tokenizer files.

    Two directories with the same identity compile to the same engine, wherever they are. Model cards, serving
    configuration and nested directories are not part of it. Reads every byte that is not in `hashes` (see `FileHashes`
    for the cost), several files at a time.

    Raises ModelError if a file cannot be read.
    """
    hashes = FileHashes() if hashes is None else hashes
    named = [(path.name, path) for path in identity_files(checkpoint)]
    if tokenizer_dir is not None and tokenizer_dir.resolve() != checkpoint.resolve():
        named += [(f"tokenizer/{path.name}", path) for path in _matching(tokenizer_dir, _CONFIG_AND_TOKENIZER)]
    named.sort()
    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
            for (name, path), file_hash in zip(
                named, pool.map(hashes.sha256, [path for _, path in named]), strict=True
            ):
                digest.update(json.dumps([name, path.stat().st_size, file_hash]).encode())
    except OSError as error:
        raise ModelError(f"cannot read the checkpoint {checkpoint}: {error}") from error
    return f"sha256:{digest.hexdigest()}"


def identity_files(checkpoint: Path) -> list[Path]:
    """The files that decide the compiled engine; pickled weights only if there are no safetensors."""
    weights = _matching(checkpoint, _SAFETENSORS) or _matching(checkpoint, _PICKLED)
    code = _matching(checkpoint, ("*.py",)) if _has_own_code(checkpoint) else []
    return weights + code + _matching(checkpoint, _CONFIG_AND_TOKENIZER)


def copy_identity_files(checkpoint: Path, tokenizer_dir: Path, out: Path, *, without: Iterable[str] = ()) -> None:
    """Copy configuration, tokenizer and code files as they are into an engine directory, over what the compiler wrote.

    Weights are not copied, nor the files named in `without`. Raises OSError.
    """
    for source in dict.fromkeys((checkpoint, tokenizer_dir)):
        for path in identity_files(source):
            if not path.name.endswith(_WEIGHTS) and path.name not in without:
                shutil.copyfile(path, out / path.name)


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)
    ]


def _has_own_code(checkpoint: Path) -> bool:
    try:
        config = json.loads((checkpoint / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "auto_map" in config
