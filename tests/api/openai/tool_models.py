"""Models with chat templates that know tools and reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from djl_trtllm.model import Tokenizer
from djl_trtllm.service import Model
from tests.support.in_process import played_model

HERMES = "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | tojson }}"
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")
THINKING = "{# <tool_call> </think> #}{{ tools }}{{ messages }}<think>\n"

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}


def tool_model(tokenizer: Tokenizer, template: str, **options: Any) -> Model:
    special: dict[str, str] = {}
    own = Tokenizer(
        tokenizer.raw, special_tokens=special, end_ids=[2], templates={"default": template}, origin=Path("model")
    )
    return played_model(own, **options)
