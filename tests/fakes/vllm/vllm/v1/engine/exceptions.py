from __future__ import annotations


class EngineDeadError(Exception):
    """Nothing runs any more."""
