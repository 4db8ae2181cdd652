"""The limits that an OpenVINO engine was compiled for, as options of this server."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.backends.as_built import Built
from djl_trtllm.config import Config
from djl_trtllm.config.sources.origin import OriginKind
from djl_trtllm.engines.manifest import MANIFEST_FILE, Manifest


def built_limits(config: Config, engine_dir: Path) -> Built | None:
    """The limits in the engine's manifest; None without one.

    OpenVINO's files have no limits, so these are defaults and no bounds: lengths that the user raises above them count.
    Raises EngineMismatchError for a damaged manifest.
    """
    manifest = Manifest.read(engine_dir)
    if manifest is None or not manifest.limits:
        return None
    limits = {name: value for name, value in manifest.limits.items() if not _widened(config, name, value)}
    longest, asked = manifest.limits.get("max_seq_len", 0), config.options
    if not config.is_set("max_seq_len"):
        if any(name not in limits and getattr(asked, name) >= longest for name in ("max_input_len", "max_output_len")):
            limits.pop("max_seq_len", None)
    elif (asked.max_seq_len or 0) > longest:
        limits = {name: value for name, value in limits.items() if name not in ("max_input_len", "max_output_len")}
    if "max_rolling_batch_size" in limits and asked.max_num_sequences is not None:
        if config.is_set("max_num_sequences"):
            limits["max_rolling_batch_size"] = min(limits["max_rolling_batch_size"], asked.max_num_sequences)
        else:
            limits["max_num_sequences"] = limits["max_rolling_batch_size"]
    return Built(f"limits in {engine_dir / MANIFEST_FILE}", limits)


def _widened(config: Config, name: str, built: int) -> bool:
    """Whether the user set the option, or raised it above the engine's limit by another one (max_num_tokens)."""
    if config.is_set(name):
        return True
    origin = config.origin(name)
    raised = origin.kind is OriginKind.DERIVED and not origin.is_preset
    return raised and getattr(config.options, name) > built
