"""Models whose files would cost a server minutes or gigabytes, if it read them as it reads others."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

TENSOR = {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}
LAYERS = {f"model.layers.{layer}.weight": TENSOR for layer in (0, 1)}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
CONFIG |= {"num_attention_heads": 4, "vocab_size": 9, "intermediate_size": 8, "max_position_embeddings": 64}


def header(tensors: dict[str, Any] | bytes) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(2)


def config(**values: Any) -> bytes:
    return json.dumps(CONFIG | values).encode()


def many() -> bytes:
    return header({f"model.layers.0.{number}": TENSOR for number in range(90_000)})


def engine_of(files: int) -> dict[str, bytes]:
    """An engine for OpenVINO whose manifest names this number of files that are not there."""
    manifest = {"format": 1, "backend": "openvino", "checkpoint": "", "options": {}, "versions": {}, "platform": ""}
    manifest |= {"created": "", "files": {f"a{number}": {"size": 1, "sha256": ""} for number in range(files)}}
    own = {"openvino_model.xml": b"<net/>", "openvino_model.bin": b"0", "manifest.json": json.dumps(manifest).encode()}
    return {**own, "tokenizer.json": str(Tokenizer(BPE()).to_str()).encode(), "model.safetensors": b""}


# Made when they are needed: they have 500 MB in all.
HOSTILE: dict[str, Callable[[], dict[str, bytes]]] = {
    "10^12 layers": lambda: {"config.json": config(num_hidden_layers=10**12)},
    "20,000,000 layers": lambda: {"config.json": config(num_hidden_layers=20_000_000)},
    "10,000 layers of 2^31 experts": lambda: {"config.json": config(num_hidden_layers=10_000, num_local_experts=2**31)},
    "a layer of 5,000 digits": lambda: {"model.safetensors": header(LAYERS | {"layers." + "9" * 5000 + ".w": TENSOR})},
    "999,999 shards": lambda: {"model-000001-of-999999.safetensors": many(), "model.safetensors": b""},
    "16 MB of empty lists": lambda: {"config.json": b'{"a":[' + b"[]," * 5_000_000 + b"0]}"},
    "16 MB of keys": lambda: {"config.json": json.dumps({str(number): 0 for number in range(1_100_000)}).encode()},
    "100 MB of one text": lambda: {"model.safetensors": header(b'{"__metadata__":"' + b"x" * 100_000_000 + b'"}')},
    "8 MB of keys": lambda: {"config.json": config(**{f"{number:030}": 0 for number in range(200_000)})},
    "90,000 tensors": lambda: {"model.safetensors": many()},
    "a stretch without end": lambda: {"config.json": config(rope_scaling={"type": "linear", "factor": float("inf")})},
    "5,000 continued lines": lambda: {"serving.properties": b"a=" + b"1\\\n" * 5_000},
    "60 MB in a line": lambda: {"serving.properties": b"option.dtype=" + b"x" * 60_000_000},
    "lists in YAML": lambda: {"config.yaml": b"trt_llm:\n  build: [" + b"1," * 120_000 + b"]"},
    "an engine of 100,000 files": lambda: engine_of(100_000),
    "a tokenizer of 60 MB": lambda: {"tokenizer.json": b'{"model":{"vocab":{' + b'"a":1,' * 10_000_000 + b'"b":2}}}'},
}
OTHERS: dict[str, Callable[[Path], None]] = {
    "a FIFO": lambda folder: os.mkfifo(folder / "serving.properties"),
    "a device": lambda folder: (folder / "serving.properties").symlink_to("/dev/zero"),
}


LOOP = "a loop of links"


def write_hostile(store: Path) -> None:
    """Write each of them into a folder of its name, and a link that leads to itself."""
    (store / LOOP).symlink_to(LOOP)
    for name in (*HOSTILE, *OTHERS):
        folder = store / name
        folder.mkdir()
        files = {"config.json": config(), "model.safetensors": header(LAYERS)} | HOSTILE.get(name, dict)()
        for file, content in files.items():
            if content:
                (folder / file).write_bytes(content)
        if name in OTHERS:
            OTHERS[name](folder)


# -- a model in order, whose tokenizer is large ------------------------------------------------------------------------

LARGE = "a tokenizer of 250,000 tokens"


def _large_tokenizer() -> str:
    """As large as those of the largest vocabularies, 17 MB with as many merges as tokens."""
    letters = [chr(code) for code in range(33, 127)]
    pairs = [(first, last) for first in letters for last in letters]
    merges = pairs + [(first + last, letter) for first, last in pairs for letter in letters]
    merges = merges[:250_000]
    vocabulary = {token: id_ for id_, token in enumerate([*letters, *(first + last for first, last in merges)])}
    return str(Tokenizer(BPE(vocab=vocabulary, merges=merges)).to_str())


def write_large(store: Path) -> None:
    """Write a model with the scripted executor and this tokenizer."""
    folder = store / LARGE
    folder.mkdir()
    (folder / "serving.properties").write_text("option.backend=scripted\noption.model_id=.\n")
    (folder / "config.json").write_bytes(config(vocab_size=300_000))
    (folder / "model.safetensors").write_bytes(header(LAYERS))
    (folder / "tokenizer.json").write_text(_large_tokenizer())
