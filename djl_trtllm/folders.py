"""Folders of a model directory that the configuration and the model's files are both looked for in."""

from __future__ import annotations

from pathlib import Path

TRUSS_REPOSITORY = Path("packages", "inflight_batcher_llm")
"""Where a Truss of the first generation holds its Triton model repository."""
