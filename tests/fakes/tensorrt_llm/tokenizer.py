"""The tokenizer that the LLM loads from the model's directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .logger import logger

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class TransformersTokenizer:
    """The Hugging Face tokenizer of a directory, without the import of transformers where tokenizer.json is there."""

    def __init__(self, directory: Path) -> None:
        import tokenizers

        self._directory = directory
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = _read_json(directory / "tokenizer_config.json")
        model = _read_json(directory / "config.json")
        self.name_or_path = str(directory)
        self.eos_token_id = self._special(config, model, "eos")
        self.bos_token_id = self._special(config, model, "bos")
        self.pad_token_id = self._special(config, model, "pad")
        self.tokenizer = self

    def _special(self, config: dict[str, Any], model: dict[str, Any], kind: str) -> int | None:
        token = config.get(f"{kind}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            token_id: int | None = self._tokenizer.token_to_id(token)
            return token_id
        found: int | list[int] | None = model.get(f"{kind}_token_id")
        return found[0] if isinstance(found, list) else found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_incrementally(
        self,
        token_ids: list[int],
        prev_text: str | None = None,
        states: dict[str, Any] | None = None,
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        if states is None:
            from tokenizers.decoders import DecodeStream

            states = {"decode_stream": DecodeStream(skip_special_tokens=skip_special_tokens)}
        stream = states["decode_stream"]
        steps = (stream.step(self._tokenizer, token_id) for token_id in token_ids)
        return (prev_text or "") + "".join(text for text in steps if text is not None), states

    def save_pretrained(self, directory: Path) -> None:
        copy_tokenizer(self._directory, directory)


def copy_tokenizer(source: Path, target: Path) -> None:
    """What `save_pretrained` leaves in `target`."""
    for name in _FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def load_hf_tokenizer(directory: Path) -> Any:
    """None, with a warning, where there is none (facts §3.1: a trtllm-build directory has no tokenizer)."""
    directory = Path(directory)
    try:
        if (directory / "tokenizer.json").exists():
            return TransformersTokenizer(directory)
        if not any((directory / name).exists() for name in _FILES):
            raise OSError(f"Can't load tokenizer for '{directory}'.")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        logger.warning(f"Failed to load hf tokenizer from {directory}, encounter error: {error}")
        return None


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
