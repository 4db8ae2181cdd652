"""Convert the tokenizer files of older checkpoints to a `tokenizer.json`.

transformers converts SentencePiece, vocabulary-and-merges and tiktoken files in a subprocess: the server does not keep
transformers in memory, does not run a model's own Python code and does not import torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djl_trtllm.errors import TokenizerError
from djl_trtllm.model.json_file import read_object
from djl_trtllm.model.weights import bounded

PROBES = (
    "Tell me a story of the little red riding hood.",
    "Once upon a time, in 1837,\nthere were two wolves:\t  one  grey, one black.\n\n",
    "Grüße, señor! 你好世界。こんにちは Привет مرحبا 🐺🧺 ﬁn ½",
    "def f(x):\n    return {'a': x ** 2}  # 3.14159",
    " leading and trailing ",
)
"""Texts on which two forms of a tokenizer must agree."""

TIMEOUT = 600.0
"""Time limit of a conversion, in seconds."""

# The subprocess imports from the same path as this process.
_PROCESS = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from djl_trtllm.model import tokenizer_conversion
tokenizer_conversion.run(*sys.argv[2:])
"""

_FACTS = "facts.json"
SOURCES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json", "*.model")


@dataclass(frozen=True)
class Converted:
    file: Path | None
    """The tokenizer.json; None for a tokenizer in Python code without such a form."""
    special_tokens: dict[str, str]
    probes: list[tuple[str, list[int]]]
    """Texts and their ids, without special tokens."""
    affixes: dict[str, bool]
    """`add_bos_token` and `add_eos_token` as observed."""


def convert(path: Path, into: Path, *, trust_remote_code: bool) -> Converted:
    """Convert the tokenizer of the directory `path` and write it to the directory `into`.

    Raises `TokenizerError` if `path` has no tokenizer files, if they cannot be converted, or if converting needs the
    model's own code and `trust_remote_code` is False.
    """
    remote = _remote_code(path)
    if not remote and not any(any(path.glob(pattern)) for pattern in SOURCES):
        shown = bounded(sorted(entry.name for entry in path.iterdir()))
        raise TokenizerError(
            f"no tokenizer files in {path}: found {shown or 'nothing'}; expected tokenizer.json, or tokenizer.model "
            "(SentencePiece), or vocab.json with merges.txt. They are part of the Hugging Face checkpoint: copy them "
            "beside the engine or the weights"
        )
    if remote and not trust_remote_code:
        raise TokenizerError(
            f"the tokenizer of {path} is Python code that comes with the model ({remote}); read it, and if you trust "
            "it set option.trust_remote_code=true (OPTION_TRUST_REMOTE_CODE=true), or add a tokenizer.json"
        )
    command = [sys.executable, "-c", _PROCESS, json.dumps(sys.path), str(path), str(into), str(trust_remote_code)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if not trust_remote_code:
        environment["HF_HUB_OFFLINE"] = "1"  # all needed files are in the directory
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TokenizerError(f"converting the tokenizer of {path} took longer than {TIMEOUT:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        tail = "\n".join(f"  | {line}" for line in lines[-12:])
        raise TokenizerError(
            f"the tokenizer of {path} could not be converted to a tokenizer.json; add one (transformers writes it with "
            f"`AutoTokenizer.from_pretrained(...).save_pretrained(...)`). Last lines of the conversion:\n{tail}"
        )
    facts = json.loads((into / _FACTS).read_text(encoding="utf-8"))
    file = into / "tokenizer.json"
    return Converted(file if file.is_file() else None, **facts)


def _remote_code(path: Path) -> str | None:
    """The class that tokenizer_config.json loads from the model's own files, if any."""
    auto_map = (read_object(path / "tokenizer_config.json", TokenizerError) or {}).get("auto_map")
    classes = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    names = [name for name in classes if name] if isinstance(classes, list) else [classes]
    return str(names[-1]) if names and names[-1] else None


def run(source: str, into: str, trust_remote_code: str) -> None:
    """Convert; runs in the process that `convert` starts."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do not need it, and loading it takes seconds
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code == "True")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(Path(into) / "tokenizer.json"))
    full = tokenizer.encode(PROBES[0])
    facts = {
        "special_tokens": {key: str(token) for key, token in tokenizer.special_tokens_map.items() if _is_text(token)},
        "probes": [(probe, tokenizer.encode(probe, add_special_tokens=False)) for probe in PROBES],
        "affixes": {
            "add_bos_token": tokenizer.bos_token_id is not None and full[0] == tokenizer.bos_token_id,
            "add_eos_token": tokenizer.eos_token_id is not None and full[-1] == tokenizer.eos_token_id,
        },
    }
    (Path(into) / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _is_text(token: Any) -> bool:
    return not isinstance(token, (list, dict)) and bool(str(token))
