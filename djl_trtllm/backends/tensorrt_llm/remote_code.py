"""A checkpoint without Python code of its own, for an engine that would run it unasked.

TensorRT-LLM's PyTorch backend reads a checkpoint with `trust_remote_code=True` for the sake of pictures and sound, also
where its own argument says False (`create_input_processor` in `inputs/registry.py`, 1.0 to 1.4). So it gets a folder of
links to the checkpoint's files in which no configuration names code (`auto_map`).
"""

import json
import tempfile
from pathlib import Path

from djl_trtllm.model.work_directory import link_with_changes

_LARGEST = 4 * 1024**2
"""Bytes of a configuration file; tokenizer.json and indices of weights name no code, and may be large."""
_KEY = "auto_map"


def without_code(checkpoint: Path) -> Path:
    """Return the checkpoint itself if it names no code, else a folder in TMPDIR, which goes with the engine process."""
    changed = {path.name: text for path in sorted(checkpoint.glob("*.json")) if (text := _without_code(path))}
    if not changed:
        return checkpoint
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-")) / (checkpoint.resolve().name or "checkpoint")
    link_with_changes(checkpoint, folder, changed)
    print(
        f"the code that {' and '.join(changed)} in {checkpoint} name is not run; if you have read it and the model "
        "needs it, set option.trust_remote_code=true (OPTION_TRUST_REMOTE_CODE=true for a fetched model)",
        flush=True,
    )
    return folder


def _without_code(path: Path) -> str | None:
    """Return the file's text without the key; None if it has none."""
    try:
        if path.stat().st_size > _LARGEST:
            return None
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or _KEY not in content:
        return None
    return json.dumps({key: value for key, value in content.items() if key != _KEY}, indent=2)
