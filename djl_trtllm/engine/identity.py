"""The content identity of a checkpoint."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from djl_trtllm.errors import ModelError

_CHUNK_BYTES = 4 << 20
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
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


def checkpoint_identity(checkpoint: Path, tokenizer_dir: Path | None = None) -> str:
    """`sha256:...` over the sorted (name, size, sha256) of a checkpoint's config, weight and tokenizer files.

    Two directories with the same identity compile to the same engine, wherever they lie; model cards, serving
    configuration and nested directories do not count. Every byte is read: about 1 s per GB from a warm page cache with
    two threads (1.8 GB/s measured on one core with SHA extensions), and the disk's read time from a cold one.

    Raises ModelError where a file cannot be read.
    """
    named = [(path.name, path) for path in identity_files(checkpoint)]
    if tokenizer_dir is not None and tokenizer_dir.resolve() != checkpoint.resolve():
        named += [(f"tokenizer/{path.name}", path) for path in _matching(tokenizer_dir, _CONFIG_AND_TOKENIZER)]
    named.sort()
    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(max_workers=2) as pool:
            for (name, path), file_hash in zip(named, pool.map(file_sha256, [path for _, path in named]), strict=True):
                digest.update(json.dumps([name, path.stat().st_size, file_hash]).encode())
    except OSError as error:
        raise ModelError(f"cannot read the checkpoint {checkpoint}: {error}") from error
    return f"sha256:{digest.hexdigest()}"


def identity_files(checkpoint: Path) -> list[Path]:
    """The files that decide what a checkpoint compiles to; pickled weights count only without safetensors."""
    weights = _matching(checkpoint, _SAFETENSORS) or _matching(checkpoint, _PICKLED)
    code = _matching(checkpoint, ("*.py",)) if _has_own_code(checkpoint) else []
    return weights + code + _matching(checkpoint, _CONFIG_AND_TOKENIZER)


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in chunks (constant memory). Raises OSError."""
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


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
