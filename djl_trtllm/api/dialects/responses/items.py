"""The items of requests to OpenAI's Responses as chat messages."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from djl_trtllm.api import chat, content
from djl_trtllm.api.conversations import Stored
from djl_trtllm.api.parameters import Problems, show

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_PARTS = {"input_text": "text", "output_text": "text", "input_image": "image_url", "input_file": "file"}
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_(\d{1,4})")
"""The id of an item that this server made: the response's, and the place in its output."""


class Items:
    """Reads the items of one request. `own` are those that it brings, as they are stored."""

    def __init__(self, stored: Stored, problems: Problems) -> None:
        self.own: list[Any] = []
        self._stored = stored
        self._problems = problems
        self._content = partial(content.read_content, problems=problems, as_part=_as_part)
        self._names: dict[str, str] = {}
        """The functions of calls, by the calls' ids."""

    def read(self, given: Any, previous: str | None, instructions: str | None) -> list[dict[str, Any]]:
        """The chat messages of the conversation."""
        self.own = [{"role": "user", "content": given}] if type(given) is str else given
        if type(self.own) is not list or not self.own:
            self._problems.invalid.append(f"'input' is {show(given)}: expected a text or a list of items")
            return []
        messages = [{"role": "system", "content": instructions}] if instructions else []
        earlier = self._stored.conversation(previous) if previous else []
        if (count := len(earlier) + len(self.own)) > content.MOST_MESSAGES:
            self._problems.invalid.append(f"there are {count} items: expected at most {content.MOST_MESSAGES}")
            return []
        for label, items in (("stored", earlier), ("input", self.own)):
            for at, item in enumerate(items):
                if self._problems.full:
                    break
                messages += self._message(item, f"{label}[{at}]")
        return chat.in_turns(messages)

    def _message(self, item: Any, place: str) -> list[dict[str, Any]]:
        given = item if isinstance(item, dict) else {}
        kind = given.get("type", "message")
        if kind == "item_reference" and type(given.get("id")) is str:
            named = _ITEM_ID.fullmatch(given["id"])
            found = named and self._stored.output(f"resp_{named[1]}", int(named[2]))
            if found:
                return self._message(found, place)
            self._problems.invalid.append(
                f"'{place}' refers to {show(given['id'])}, which is not stored: send the item"
            )
        elif kind == "message" and type(role := given.get("role")) is str and role in _ROLES:
            return [{"role": _ROLES[role], "content": self._content(given.get("content"), f"{place}.content")}]
        elif kind == "reasoning":
            text = _reasoning(given)
            return [{"role": "assistant", "content": "", "reasoning_content": text}] if text else []
        elif kind == "function_call":
            return self._call(given, place)
        elif kind == "function_call_output" and type(given.get("call_id")) is str:
            call = given["call_id"]
            message = {"role": "tool", "content": self._content(given.get("output"), f"{place}.output")}
            function = {"name": self._names[call]} if call in self._names else {}
            return [message | {"tool_call_id": call} | function]
        elif kind == "message" or type(kind) is not str or kind.startswith("function_call"):
            self._problems.invalid.append(
                f"'{place}' is {show(item)}: expected a message with 'role' and 'content', a function_call with "
                "'call_id', 'name' and 'arguments', or a function_call_output with 'call_id' and 'output'"
            )
        else:
            self._problems.unsupported.append(f"'{place}' is of type {show(kind)}, which this server does not take")
        return []

    def _call(self, given: dict[str, Any], place: str) -> list[dict[str, Any]]:
        call, name, arguments = given.get("call_id"), given.get("name"), given.get("arguments")
        if type(call) is not str or not chat.is_name(name) or type(arguments) is not str:
            self._problems.invalid.append(f"'{place}' is {show(given)}: expected 'call_id', 'name' and 'arguments'")
            return []
        shown = shown_name(given.get("namespace"), name)
        self._names[call] = shown
        function = {"name": shown, "arguments": arguments}
        calls = [{"id": call, "type": "function", "function": function}]
        return [{"role": "assistant", "content": "", "tool_calls": calls}]


def _as_part(part: Any) -> Any:
    """The content part of chat that a part of an item is."""
    kind = part.get("type") if type(part) is dict else None
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part | {"type": _PARTS.get(kind, kind)} if type(kind) is str else part


def shown_name(namespace: Any, name: Any) -> str:
    """The name of a function as the model is shown it."""
    return f"{namespace}.{name}" if type(namespace) is str and namespace else str(name)


def _reasoning(item: dict[str, Any]) -> str:
    """The text of a reasoning item, "" if it has none that can be read here."""
    for member in ("content", "summary"):
        parts = item.get(member)
        texts = [part.get("text") for part in parts if type(part) is dict] if type(parts) is list else []
        if text := "\n".join(text for text in texts if type(text) is str):
            return text
    return chat.from_opaque(item.get("encrypted_content"))
