from __future__ import annotations

from enum import Enum


class UsageContext(str, Enum):
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
