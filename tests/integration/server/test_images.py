"""Images that are none, too large, too many or elsewhere: the server refuses them, and others notice nothing."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.faults.fuzz import damaged
from tests.support.client import JSON
from tests.support.processes import PATIENCE, wait_until
from tests.support.random_requests import random_image_request
from tests.support.server import Server, serving
from tests.support.vision import chunk, data_url, encoded, image_part, picture, png, seeing_model, text_bomb

pytestmark = pytest.mark.slow

COUNT, SEED = int(os.environ.get("RANDOM_REQUESTS", "300")), int(os.environ.get("RANDOM_SEED", "0"))
AT_ONCE = 16
MEGABYTES_MORE = 32
"""Megabytes by which the server's memory may grow after a third of the requests."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("seeing")
    model = seeing_model(directory / "model", **{"option.allowed_media_domains": "localhost"})
    with serving(model, directory, SERVING_MONITOR="true") as started:
        yield started


def chat(*parts: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "the wolf"}
    return {"messages": [{"role": "user", "content": [*parts, text]}], "max_tokens": 4, "temperature": 0}


def post(server: Server, body: dict[str, Any]) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json=body)


def test_the_page_and_the_log_have_the_count_of_images_and_their_tokens_and_never_the_files(seeing: Server) -> None:
    source = random.Random(SEED)
    file = encoded(picture(84, 84, source.randrange(2**24)))
    url = data_url(file)
    found = post(seeing, chat(image_part(url)))
    request = found.headers["x-request-id"]
    wait_until(lambda: seeing.says(request), what="the request in the log")
    with seeing.http.stream("GET", "/monitor/events") as stream:
        event = next(line for line in stream.iter_lines() if line.startswith("data: "))
    (row,) = [row for row in json.loads(event.removeprefix("data: "))["model"]["rows"] if row[1] == request]
    assert row[-2:] == [1, 9]
    coded = url.partition(",")[2]
    shown = "\n".join([event, *seeing.log])
    assert not any(coded[at : at + 32] in shown for at in range(0, len(coded) - 32, 16))


def test_tokens_of_images_are_in_usage_log_and_metrics(seeing: Server) -> None:
    names = ("images_total", "image_tokens_total", "image_bytes_total", "refused_images_total")
    post(seeing, chat(image_part(data_url(b"no image"))))
    before = list(map(seeing.metric, names))
    plain = post(seeing, chat()).json()["usage"]["prompt_tokens"]
    files = encoded(picture(84, 56)), encoded()
    found = post(seeing, chat(*(image_part(data_url(file)) for file in files)))
    assert found.json()["usage"]["prompt_tokens"] == plain + 6 + 4
    wait_until(lambda: seeing.says(f"prompt_tokens={plain + 10} images=2 image_tokens=10 "))
    post(seeing, chat(image_part(data_url(b"no image"))))
    counted = [after - before for before, after in zip(before, map(seeing.metric, names), strict=True)]
    assert counted == [2, 10, sum(map(len, files)), 1]


HOSTILE = {
    "200 images": ([image_part(data_url(encoded()))] * 200, "200 images"),
    "20,000 x 20,000": ([image_part(data_url(png(20_000, 20_000, chunk(b"IDAT", b""))))], "pixels"),
    "a bomb": ([image_part(data_url(text_bomb(8_000_000)))], "damaged"),
    "SVG": ([image_part("data:image/svg+xml;base64,PHN2Zy8+")], "expected a file of PNG"),
    "cut": ([image_part(data_url(encoded()[:-200]))], "damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_image_or_too_much_is_refused_and_the_server_goes_on(seeing: Server, name: str) -> None:
    parts, told = HOSTILE[name]
    refused = post(seeing, chat(*parts))
    assert refused.status_code == 400
    assert told in refused.json()["error"]["message"]
    assert post(seeing, chat()).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nothing_is_fetched_from_this_machine(seeing: Server, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        port = listening.getsockname()[1]
        refused = post(seeing, chat(image_part(f"http://{host}:{port}/a.png?token=secret")))
        assert refused.status_code == 400
        assert "'messages[0].content[0]'" in refused.json()["error"]["message"]
        with pytest.raises(TimeoutError):
            listening.accept()
    assert not seeing.says("secret")


def test_random_images_are_answered_or_refused_and_nothing_is_left(seeing: Server) -> None:
    source = random.Random(SEED)
    statuses: collections.Counter[int] = collections.Counter()

    async def send(client: httpx.AsyncClient, count: int) -> None:
        for _ in range(count):
            request = random_image_request(source, damaged)
            response = await client.post(request.path, content=json.dumps(request.body), headers=JSON)
            statuses[response.status_code] += 1
            assert response.status_code in (200, 400, 413, 422, 424), (request, response.text)

    async def batch(count: int) -> int:
        async with httpx.AsyncClient(base_url=seeing.url, timeout=PATIENCE, trust_env=False) as client:
            await asyncio.gather(*(send(client, count // AT_ONCE) for _ in range(AT_ONCE)))
        return int(seeing.process.memory_info().rss)

    early = asyncio.run(batch(COUNT // 3))
    late = asyncio.run(batch(COUNT - COUNT // 3))
    assert late - early < MEGABYTES_MORE * 2**20
    assert min(statuses[200], statuses[400]) > COUNT / 50
    wait_until(seeing.idle)
