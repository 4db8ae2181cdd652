"""A Llama with random weights for `benchmarks.gpu`: its shape and a tokenizer, whose weights the engine makes up.

    python -m benchmarks.gpu_model DIRECTORY [--size 1b|8b|70b-wide]

The tokenizer is trained on Python's own library, so nothing is downloaded. vLLM loads it with `load_format=dummy`; the
one small tensor is there because a checkpoint without weights is refused before an engine starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIZES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b-wide": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8, "num_attention_heads": 64},
}
"""Shapes of Llama 3.2 1B, Llama 3.1 8B, and a tenth of the layers of Llama 3.1 70B."""
_WORDS = 32000
_FILES = 1500
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def texts() -> Iterator[str]:
    """The files of Python's library that are ASCII."""
    for file in sorted(Path(os.__file__).parent.rglob("*.py")):
        data = file.read_bytes()
        if data.isascii():
            yield data.decode()


def make(directory: Path, size: str) -> None:
    """Write the checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_WORDS,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(texts(), _FILES), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SIZES[size],
        "head_dim": SIZES[size]["hidden_size"] // SIZES[size]["num_attention_heads"],
        "num_key_value_heads": 8,
        "vocab_size": _WORDS,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(ends))
    (directory / "tokenizer_config.json").write_text(json.dumps({**words, "chat_template": _TEMPLATE}))
    save_file({"model.norm.weight": np.ones(1, np.float32)}, directory / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    options = parser.parse_args()
    make(options.directory, options.size)


if __name__ == "__main__":
    main()
