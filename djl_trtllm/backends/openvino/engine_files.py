"""Check the files of an OpenVINO engine."""

from __future__ import annotations

import re
from pathlib import Path

from djl_trtllm.engines.manifest import Manifest, raise_damaged

MODEL_XML = "openvino_model.xml"
TOKENIZER_XML = "openvino_tokenizer.xml"
DETOKENIZER_XML = "openvino_detokenizer.xml"
_CONSTANT = re.compile(rb'<data [^>]*?\boffset="(\d+)"[^>]*?\bsize="(\d+)"')

_ATTENTION = b'type="ScaledDotProductAttention"'

NO_ATTENTION = "OpenVINO's continuous batching cannot run this architecture"
"""How the message starts for a model without attention, whose KV cache could be paged."""


class NoAttentionError(Exception):
    """A model that OpenVINO compiles and cannot run."""


def require_attention(xml: Path) -> None:
    """Raise NoAttentionError for a model without attention. Raises OSError."""
    if _ATTENTION not in xml.read_bytes():
        raise NoAttentionError(
            f"{NO_ATTENTION}: {xml.name} has no attention layer, and the KV cache of attention layers is what it pages"
        )


def has_tokenizer(directory: Path) -> bool:
    """Whether an engine has the tokenizer that guides are compiled for."""
    return all((directory / name).is_file() for name in (TOKENIZER_XML, DETOKENIZER_XML))


def check_engine(directory: Path) -> Manifest | None:
    """Check an engine directory without loading it, and return its manifest, if it has one.

    Compares sizes with the manifest, and the IR with its weights file, so that a truncated engine fails here and not
    inside the runtime. Raises EngineMismatchError naming each bad file.
    """
    manifest = Manifest.read(directory)
    if manifest is not None:
        manifest.require_whole(directory)
    raise_damaged(directory, ir_problems(directory / MODEL_XML))
    return manifest


def ir_problems(xml: Path) -> list[str]:
    """The defects of an OpenVINO IR (an `.xml` and the `.bin` beside it), one line each."""
    try:
        content = xml.read_bytes()
    except FileNotFoundError:
        return [f"{xml.name}: missing"]
    except OSError as error:
        return [f"{xml.name}: cannot be read ({error})"]
    if not content.lstrip().startswith(b"<") or not content.rstrip().endswith(b"</net>"):
        return [f"{xml.name}: not a complete OpenVINO model, {len(content)} bytes that do not end in </net>"]
    weights = xml.with_suffix(".bin")
    try:
        size = weights.stat().st_size
    except OSError as error:
        return [f"{weights.name}: missing" if isinstance(error, FileNotFoundError) else f"{weights.name}: {error}"]
    needed = max((int(match[1]) + int(match[2]) for match in _CONSTANT.finditer(content)), default=1)
    if size < needed:
        return [f"{weights.name}: truncated, {size} bytes where {xml.name} refers to {needed}"]
    return []
