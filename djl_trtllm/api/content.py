"""Chat messages and their contents: texts and images, as every dialect's chats have them.

A content is a text, or a list of parts where it has images: `{"type": "text", "text": ...}`, and `{"type": "image",
"image": ImageSource}` until `take_images` takes the sources out. Images are only named here: `service/prompts.py` reads
them, when the request is admitted.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from djl_trtllm.api.parameters import Kind, Problems, found, show
from djl_trtllm.config import Options
from djl_trtllm.config.rules import most_images
from djl_trtllm.request import ImageSource

Content: TypeAlias = "str | list[dict[str, Any]]"

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]},
            ]
        },
    },
    "required": ["type", "image_url"],
}
_PARTS = {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
    },
    "required": ["role"],
}
_OTHER_MEDIA = {"input_audio": "audio", "audio_url": "audio", "video_url": "a video", "file": "a file"}
MOST_MESSAGES = 4096
"""The most messages of a request, the most parts of their contents, and the most tool calls."""
MESSAGES = Kind(
    "a list of at least one message",
    lambda value: value,
    {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MOST_MESSAGES},
)
"""Describes the parameter that `read_messages` reads."""


def read_messages(raw: Any, problems: Problems) -> list[dict[str, Any]]:
    """Return the messages with contents as strings, or as parts where they have images.

    Most chat templates do not accept a list of parts, so text parts alone are joined by newlines. Other fields (`name`,
    `tool_calls`, ...) are passed to the template as they are; the template decides which roles exist.
    """
    messages: list[dict[str, Any]] = []
    for where, message in each_message(raw, problems):
        if type(message) is not dict:
            problems.invalid.append(f"'{where}' is {show(message)}: expected an object with 'role' and 'content'")
            continue
        role = message.get("role")
        if type(role) is not str or not role:
            problems.invalid.append(f"'{where}.role' {found(role)}: expected a string such as \"user\"")
        content = message.get("content")
        if content is not None or not message.get("tool_calls"):
            content = read_content(content, f"{where}.content", problems)
        messages.append(message | {"content": content})
    return messages


def read_texts(raw: Any, problems: Problems) -> list[dict[str, Any]]:
    """Return the messages as `read_messages` does, with a problem for each image."""
    messages = read_messages(raw, problems)
    for image in take_images(messages)[1]:
        problems.unsupported.append(f"'{image.place}' is an image, and only texts are taken here")
    return messages


def each_message(raw: Any, problems: Problems) -> Iterator[tuple[str, Any]]:
    """Yield each message with its name in errors: none if there are too many, no more than an error shows."""
    if type(raw) is not list or not raw:
        problems.invalid.append(f"'messages' {found(raw)}: expected a list of at least one message")
    elif (problem := _too_many(raw)) is not None:
        problems.invalid.append(problem)
    else:
        for index, message in enumerate(raw):
            if problems.full:
                return
            yield f"messages[{index}]", message


def _too_many(raw: list[Any]) -> str | None:
    """Return the problem if there are too many messages, parts or tool calls."""
    if len(raw) > MOST_MESSAGES:
        return f"'messages' has {len(raw)} messages: expected at most {MOST_MESSAGES}"
    for member in ("content", "tool_calls"):
        lists = [message[member] for message in raw if type(message) is dict and type(message.get(member)) is list]
        if (count := sum(map(len, lists))) > MOST_MESSAGES:
            return f"'messages' has {count} items in '{member}': expected at most {MOST_MESSAGES} in all messages"
    return None


def read_content(
    content: Any, place: str, problems: Problems, as_part: Callable[[Any], Any] = lambda part: part
) -> Content:
    """A content, a string or a list of parts. `as_part` turns each part into a content part of chat."""
    if type(content) is str:
        return content
    if type(content) is not list or len(content) > MOST_MESSAGES:
        problems.invalid.append(f"'{place}' {found(content)}: expected a string or a list of text parts")
        return ""
    parts = enumerate(content)
    read = (read_part(as_part(part), f"{place}[{at}]", problems) for at, part in parts if not problems.full)
    return join([part for part in read if part is not None])


def join(parts: list[dict[str, Any]]) -> Content:
    """The content of a message: these parts, or one text with a line for each part if all of them are texts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def parts_of(content: Content) -> list[dict[str, Any]]:
    """The parts of a content; `join` makes it of them."""
    return ([{"type": "text", "text": content}] if content else []) if isinstance(content, str) else content


def read_part(part: Any, where: str, problems: Problems) -> dict[str, Any] | None:
    """A content part, None with a problem for one that is neither a text nor an image."""
    kind = part.get("type") if type(part) is dict else None
    if kind == "text" and type(part.get("text")) is str:
        return {"type": "text", "text": part["text"]}
    if kind in ("image_url", "image"):
        url = _url(part)
        if type(url) is str and url.startswith(_SCHEMES):
            return {"type": "image", "image": ImageSource(url, where)}
        problems.invalid.append(
            f"'{where}' is {show(part)}: expected an image as a data: URL with base64, or an http or https address"
        )
    elif type(kind) is str and kind in _OTHER_MEDIA:
        problems.unsupported.append(f"'{where}' is {_OTHER_MEDIA[kind]}, and models take texts and images here")
    else:
        problems.invalid.append(f'\'{where}\' is {show(part)}: expected {{"type": "text", "text": string}}')
    return None


_SCHEMES = ("data:", "http://", "https://")


def _url(part: dict[str, Any]) -> Any:
    """Return the address or data of an image part: OpenAI's `image_url`, or Anthropic's `source`."""
    named = part.get("image_url", part.get("source"))
    if type(named) is not dict:
        return named
    if named.get("type") == "base64" and type(named.get("data")) is str:
        return f"data:{named.get('media_type')};base64,{named['data']}"
    return named.get("url")


def take_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[ImageSource, ...]]:
    """The messages as chat templates take them, and their images."""
    images: list[ImageSource] = []
    taken = []
    for message in messages:
        if isinstance(message.get("content"), list):
            images += [part["image"] for part in message["content"] if part["type"] == "image"]
            parts = [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]
            message = message | {"content": parts}
        taken.append(message)
    return taken, tuple(images)


def check_images(images: tuple[ImageSource, ...], template: str, options: Options, problems: Problems) -> None:
    """Add problems of the images' number and addresses; reads none. `template` is the chat template's source."""
    if not images:
        return
    most = most_images(options.limit_mm_per_prompt)
    if "image" not in template:
        problems.unsupported.append(
            f"'{images[0].place}' is an image, and this model takes text only: its chat template has no place for it"
        )
    elif len(images) > most:
        problems.invalid.append(
            f"the messages have {len(images)} images: expected at most {most} (option.limit_mm_per_prompt)"
        )
    else:
        problems.invalid += [
            problem for image in images if (problem := _refused(image, options.allowed_media_domains)) is not None
        ]


def _refused(image: ImageSource, domains: tuple[str, ...] | None) -> str | None:
    """Return the problem of an image that may not be fetched, None if it may or is in the request itself."""
    if image.url.startswith("data:"):
        return None
    try:
        host = urlsplit(image.url).hostname
    except ValueError:
        host = None
    if host in {domain.lower() for domain in domains or ()}:
        return None
    at, allowed = show(host) if host else "an address without a host", " or ".join(domains or ())
    return (
        f"'{image.place}' is an image at {at}, which the operator has not allowed (option.allowed_media_domains): "
        f"{f'expected {allowed}, or' if allowed else 'send'} the image itself as a data: URL"
    )
