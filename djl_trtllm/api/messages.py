"""Checks chat messages and converts them to the form that chat templates accept."""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.parameters import Kind, Problems, show

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
    },
    "required": ["role"],
}
_MOST_MESSAGES = 4096
"""Of one request, and as many parts of their contents and as many tool calls."""
MESSAGES = Kind(
    "a list of at least one message",
    lambda value: value,
    {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": _MOST_MESSAGES},
)
"""Describes the parameter that `read_messages` reads."""


def read_messages(raw: Any, problems: Problems) -> list[dict[str, Any]]:
    """Return the messages with contents as strings; text parts are joined by newlines.

    Most chat templates do not accept a list of parts. Other fields (`name`, `tool_calls`, ...) are passed to the
    template as they are; the template decides which roles exist.
    """
    if type(raw) is not list or not raw:
        problems.invalid.append(f"'messages' is {show(raw)}: expected a list of at least one message")
        return []
    if (problem := _too_many(raw)) is not None:
        problems.invalid.append(problem)
        return []
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(raw):
        if problems.full:
            break  # no error shows more
        where = f"messages[{index}]"
        if type(message) is not dict:
            problems.invalid.append(f"'{where}' is {show(message)}: expected an object with 'role' and 'content'")
            continue
        role = message.get("role")
        if type(role) is not str or not role:
            problems.invalid.append(f"'{where}.role' is {show(role)}: expected a string such as \"user\"")
        content = message.get("content")
        if type(content) is list:
            content = _join_parts(content, where, problems)
        elif type(content) is not str and not (content is None and message.get("tool_calls")):
            problems.invalid.append(f"'{where}.content' is {show(content)}: expected a string or a list of text parts")
        messages.append(message | {"content": content})
    return messages


def _too_many(raw: list[Any]) -> str | None:
    """What there is too much of."""
    if len(raw) > _MOST_MESSAGES:
        return f"'messages' has {len(raw)} messages: expected at most {_MOST_MESSAGES}"
    for member in ("content", "tool_calls"):
        lists = [message[member] for message in raw if type(message) is dict and type(message.get(member)) is list]
        if (count := sum(map(len, lists))) > _MOST_MESSAGES:
            return f"'messages' has {count} items in '{member}': expected at most {_MOST_MESSAGES} in all messages"
    return None


def _join_parts(parts: list[Any], where: str, problems: Problems) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        if problems.full:
            break
        kind = part.get("type") if type(part) is dict else None
        if kind == "text" and type(part.get("text")) is str:
            texts.append(part["text"])
        elif kind in ("image_url", "image", "input_audio", "audio_url", "video_url", "file"):
            problems.unsupported.append(
                f"'{where}.content[{index}]' is of type {show(kind)}, and this model takes text only"
            )
        else:
            problems.invalid.append(
                f'\'{where}.content[{index}]\' is {show(part)}: expected {{"type": "text", "text": string}}'
            )
    return "\n".join(texts)
