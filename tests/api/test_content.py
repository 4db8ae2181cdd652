"""Images in the contents of chats: every dialect finds them in order, and refuses what it can before it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api.base import RawRequest
from djl_trtllm.api.dialects.messages import MESSAGES
from djl_trtllm.api.dialects.openai.dialect import OPENAI
from djl_trtllm.api.dialects.responses import RESPONSES
from djl_trtllm.api.dialects.truss import TRUSS
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, ImageSource
from tests.support.in_process import played_model
from tests.support.tables import by_rows
from tests.support.vision import TEMPLATE, image_part

A, B = "data:image/png;base64,AAAA", "data:image/jpeg;base64,BBBB"
URL = "https://images.example.com/a.png"
HELLO = {"type": "text", "text": "hello"}
DIALECTS = {
    "/v1/chat/completions": OPENAI,
    "/invocations": DEFAULT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/predict": TRUSS,
}


def parsed(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], template: str = TEMPLATE, **options: Any
) -> GenerationRequest:
    raw = tokenizer.raw
    own = Tokenizer(raw, special_tokens={}, end_ids=[2], templates={"default": template}, origin=Path("model"))
    request = RawRequest(json.dumps(body).encode(), {}, path)
    (generation,) = DIALECTS[path].parse(request, played_model(own, **options)).requests
    return generation


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def source(url: str) -> dict[str, Any]:
    """Anthropic's block."""
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def input_image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(image_part(A), HELLO, {"type": "image_url", "image_url": B}),
    "/invocations": chat(image_part(A), HELLO, image_part(B)),
    "/v1/messages": {**chat(source(A), HELLO, source(B)), "max_tokens": 8},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [input_image(A), {"type": "input_text", "text": "hello"}, input_image(B)]}
        ]
    },
}


@by_rows("path", BODIES)
def test_images_are_found_in_order_and_leave_their_places(tokenizer: Tokenizer, path: str) -> None:
    request = parsed(tokenizer, path, BODIES[path])
    where = "input[0]" if path == "/v1/responses" else "messages[0]"
    assert request.images == (ImageSource(A, f"{where}.content[0]"), ImageSource(B, f"{where}.content[2]"))
    assert request.messages == [{"role": "user", "content": [{"type": "image"}, HELLO, {"type": "image"}]}]


def test_turns_that_are_joined_keep_the_order_of_their_images(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": [source(A), HELLO]},
        {"role": "user", "content": "and"},
        {"role": "user", "content": [source(B)]},
    ]
    request = parsed(tokenizer, "/v1/messages", {"messages": messages, "max_tokens": 8})
    content = [{"type": "image"}, HELLO, {"type": "text", "text": "and"}, {"type": "image"}]
    assert request.messages == [{"role": "user", "content": content}]
    assert [image.url for image in request.images] == [A, B]


@pytest.mark.parametrize("failed", [False, True])
def test_results_of_tools_have_images(tokenizer: Tokenizer, failed: bool) -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [source(A)], "is_error": failed}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}]
    body = {"messages": [*messages, {"role": "user", "content": [result]}], "max_tokens": 8}
    request = parsed(tokenizer, "/v1/messages", body, TEMPLATE + "{# tools <tool_call> #}")
    assert request.images == (ImageSource(A, "messages[2].content[0].content[0]"),)
    assert request.messages is not None
    error = [{"type": "text", "text": "Error:"}] if failed else []
    assert request.messages[2]["content"] == [*error, {"type": "image"}]


def test_texts_alone_stay_one_text(tokenizer: Tokenizer) -> None:
    request = parsed(tokenizer, "/v1/chat/completions", chat(HELLO, HELLO))
    assert (request.images, request.messages) == ((), [{"role": "user", "content": "hello\nhello"}])


def refusal(tokenizer: Tokenizer, path: str, body: dict[str, Any], *given: Any, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parsed(tokenizer, path, body, *given, **options)
    return caught.value


@by_rows("path", BODIES)
def test_a_model_that_takes_text_only_refuses_images_by_name(tokenizer: Tokenizer, path: str) -> None:
    error = refusal(tokenizer, path, BODIES[path], "{{ messages }}")
    assert isinstance(error, UnsupportedParameterError)
    assert "content[0]' is an image, and this model takes text only" in str(error)


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 16), ({"limit_mm_per_prompt": '{"image": 2}'}, 2), ({"limit_mm_per_prompt": '{"image": {"count": 3}}'}, 3)],
)
def test_the_number_of_images_is_bounded(tokenizer: Tokenizer, options: dict[str, Any], most: int) -> None:
    path = "/v1/chat/completions"
    assert len(parsed(tokenizer, path, chat(*[image_part(A)] * most), **options).images) == most
    told = str(refusal(tokenizer, path, chat(*[image_part(A)] * (most + 1)), **options))
    assert f"{most + 1} images: expected at most {most} (option.limit_mm_per_prompt)" in told


def test_only_hosts_that_the_operator_allows_are_asked_for_images(tokenizer: Tokenizer) -> None:
    allowed: dict[str, Any] = {"allowed_media_domains": ("Images.Example.com", "cdn.example.com")}
    for path, part in (("/v1/chat/completions", image_part(URL)), ("/v1/messages", source(URL))):
        body = {**chat(part), "max_tokens": 8}
        assert parsed(tokenizer, path, body, **allowed).images == (ImageSource(URL, "messages[0].content[0]"),)
        assert "option.allowed_media_domains" in str(refusal(tokenizer, path, body))


@by_rows(
    "url",
    [
        *("https://example.com/a", "https://images.example.com.evil.com/a", "http://127.0.0.1/a", "http://[::1/a"),
        *("https://images.example.com@evil.com/a", "https://evil.com/?images.example.com", "http:///a"),
    ],
)
def test_other_hosts_are_refused_without_the_rest_of_the_address(tokenizer: Tokenizer, url: str) -> None:
    allowed = {"allowed_media_domains": ("images.example.com",)}
    told = str(refusal(tokenizer, "/v1/chat/completions", chat(image_part(f"{url}?token=secret")), **allowed))
    assert told.startswith("'messages[0].content[0]' is an image at")
    assert "expected images.example.com" in told
    assert "secret" not in told


@by_rows(
    "part",
    [
        *({"type": "image_url"}, {"type": "image_url", "image_url": {}}, {"type": "image_url", "image_url": 5}),
        *(image_part("ftp://a/b"), image_part("file:///etc/passwd"), image_part(""), {"type": "image", "source": []}),
        {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
    ],
)
def test_an_image_that_is_neither_here_nor_at_an_address_is_refused(tokenizer: Tokenizer, part: dict[str, Any]) -> None:
    error = refusal(tokenizer, "/v1/chat/completions", chat(part))
    assert not isinstance(error, UnsupportedParameterError)
    assert str(error).startswith("'messages[0].content[0]' is an image of")


def test_an_api_of_texts_refuses_images(tokenizer: Tokenizer) -> None:
    body = chat(image_part(A))
    assert "'messages[0].content[0]' is an image" in str(refusal(tokenizer, "/predict", body))
