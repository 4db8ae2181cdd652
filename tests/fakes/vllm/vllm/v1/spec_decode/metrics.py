from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SpecDecodingStats:
    num_drafts: int = 0
    num_draft_tokens: int = 0
