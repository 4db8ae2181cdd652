"""A model that takes images answers as transformers does, alone and among others, and after the loss of its engine."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from djl_trtllm.backends.planning import compile_checkpoint
from djl_trtllm.config import load
from tests.integration.conftest import compiling_here
from tests.support.client import raw_post, read_until
from tests.support.processes import wait_until
from tests.support.server import Server, serving
from tests.support.vision import VisionReference, data_url, encoded, image_part, picture, write_vision_checkpoint

pytestmark = pytest.mark.slow

TOKENS = 32
SIZES = ((112, 84), (56, 140), (120, 80), (300, 500))
"""Sizes of images that are scaled, and of images that are not."""
QUESTION = {"type": "text", "text": "what is in this picture"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_vision_checkpoint(tmp_path_factory.mktemp("vision") / "qwen2-vl")
    options = {
        "backend": "openvino",
        "dtype": "fp32",
        # Rounding the KV cache may decide between two tokens of a model with random weights.
        "kv_cache_dtype": "fp32",
        "max_rolling_batch_size": 16,
        "max_input_len": 512,
        "max_output_len": 1024,
        "model_name": "seeing",
    }
    lines = [f"option.{name}={value}\n" for name, value in options.items()]
    (path / "serving.properties").write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def seeing(checkpoint: Path, scratch: Path) -> Iterator[Server]:
    engine = checkpoint.with_name("engine")
    with compiling_here():
        compile_checkpoint(load(checkpoint, {}), checkpoint, engine)
    shutil.copy(checkpoint / "serving.properties", engine)
    with serving(engine, scratch) as started:
        yield started


@pytest.fixture(scope="module")
def asked(checkpoint: Path) -> list[tuple[dict[str, Any], list[int]]]:
    """Chats with no, one and two images, and transformers' tokens after them."""
    reference = VisionReference(checkpoint)
    images = [picture(*size, colour) for colour, size in enumerate(SIZES)]
    found = []
    for chosen in ([], *([image] for image in images), *itertools.islice(itertools.permutations(images, 2), 4)):
        marks = [{"type": "image"} for _ in chosen]
        expected = reference.greedy([{"role": "user", "content": [*marks, QUESTION]}], list(chosen), TOKENS)
        parts = [image_part(data_url(encoded(image))) for image in chosen]
        found.append((chat([*parts, QUESTION]), expected))
    return found


def chat(content: Any, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "min_tokens": 0,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def answer(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def engine(server: Server) -> psutil.Process:
    """Return the engine process: another process renders chats."""
    (found,) = [each for each in server.hosts() if any("executor" in part for part in each.cmdline())]
    return found


def ids(server: Server, body: dict[str, Any]) -> list[int]:
    found: list[int] = answer(server, body)["choices"][0]["token_ids"]
    return found


def test_greedy_output_equals_transformers_with_one_and_two_images(
    seeing: Server, asked: list[tuple[dict[str, Any], list[int]]]
) -> None:
    for body, expected in asked:
        assert ids(seeing, body) == expected


def test_many_streams_at_once_get_what_each_gets_alone(
    seeing: Server, asked: list[tuple[dict[str, Any], list[int]]]
) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda case: ids(seeing, case[0]), asked * 2))
    assert found == [expected for _, expected in asked * 2]


def test_usage_and_log_count_the_tokens_of_images(seeing: Server) -> None:
    plain = answer(seeing, chat([QUESTION], 1))["usage"]["prompt_tokens"]
    parts = [image_part(data_url(encoded(picture(*size)))) for size in ((112, 84), (56, 56))]
    with_images = answer(seeing, chat([*parts, QUESTION], 1))["usage"]["prompt_tokens"]
    assert with_images == plain + (12 + 4) + 2 * 2  # and two marks around each
    wait_until(lambda: seeing.says(f"prompt_tokens={with_images} images=2 image_tokens=16 "))


def test_a_client_that_leaves_takes_nothing_of_others(
    seeing: Server, asked: list[tuple[dict[str, Any], list[int]]]
) -> None:
    body, expected = asked[-1]
    long = json.dumps({**body, "max_tokens": 1000, "stream": True}).encode()
    for _ in range(4):
        with seeing.connect() as connection:
            connection.sendall(raw_post(long, path="/v1/chat/completions"))
            read_until(connection, b"data:")
            assert ids(seeing, body) == expected
    wait_until(seeing.idle)


def texts_across_a_kill(seeing: Server, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts of streams whose engine process is killed while all of them run."""

    def text(body: dict[str, Any]) -> str:
        parts = []
        with seeing.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    parts += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
        return "".join(parts)

    restarts, begun = seeing.metric("executor_restarts_total"), seeing.metric("generated_tokens_total")
    count = len(bodies)
    with ThreadPoolExecutor(count) as pool:
        found = [pool.submit(text, body) for body in bodies]
        wait_until(
            lambda: seeing.metric("running") == count and seeing.metric("generated_tokens_total") > begun + 40 * count
        )
        engine(seeing).kill()
        texts = [each.result() for each in found]
    assert seeing.metric("executor_restarts_total") == restarts + 1
    return texts


def test_streams_go_on_byte_for_byte_after_the_engine_process_is_killed(
    seeing: Server, asked: list[tuple[dict[str, Any], list[int]]]
) -> None:
    bodies = [{**body, "max_tokens": 400} for body, _ in asked[:4]]
    bodies.append({**bodies[-1], "temperature": 1, "seed": 7})
    expected = [answer(seeing, body)["choices"][0]["message"]["content"] for body in bodies]
    assert texts_across_a_kill(seeing, bodies) == expected
    wait_until(lambda: seeing.says(" resumes=1 reseeded=False "))


MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


@pytest.mark.parametrize("text", [*MARKS, "<|vision_start|><|image_pad|><|vision_end|>", "<ov_genai_image_0>"])
@pytest.mark.parametrize("images", [0, 1])
def test_the_models_own_marks_in_texts_end_no_engine(seeing: Server, text: str, images: int) -> None:
    require_refused(seeing, text, images)


def require_refused(seeing: Server, text: str, images: int) -> None:
    before = engine(seeing)
    parts = [image_part(data_url(encoded()))] * images
    body = chat([*parts, {"type": "text", "text": text}], 2)
    response = seeing.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert "out of texts" in response.json()["error"]["message"]
    assert engine(seeing) == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "seeing", "max_tokens": 8}),
        ("/invocations", {"max_tokens": 8}),
        ("/v1/responses", {"max_output_tokens": 8}),
    ],
)
def test_every_chat_takes_images(seeing: Server, path: str, body: dict[str, Any]) -> None:
    url = data_url(encoded(picture(112, 84)))
    if path == "/v1/responses":
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION["text"]}]
        body = {**body, "input": [{"role": "user", "content": parts}]}
    elif path == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        body = {**body, "messages": [{"role": "user", "content": [{"type": "image", "source": source}, QUESTION]}]}
    else:
        body = {**body, "messages": [{"role": "user", "content": [image_part(url), QUESTION]}]}
    response = seeing.http.post(path, json={**body, "temperature": 0})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    expected = answer(seeing, chat([image_part(url), QUESTION], 1))["usage"]["prompt_tokens"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == expected
