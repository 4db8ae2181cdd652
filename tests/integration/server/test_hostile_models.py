"""Models whose files would cost the server minutes or gigabytes are refused while it answers.

`python -m pytest -s` with this file prints what each costs; docs/verification.md has the figures.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tests.support.hostile import Times, cpu_seconds, late
from tests.support.models import scripted_model
from tests.support.processes import InBackground, wait_until
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow

TENSOR = {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}
LAYERS = {f"model.layers.{layer}.weight": TENSOR for layer in (0, 1)}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
CONFIG |= {"num_attention_heads": 4, "vocab_size": 9, "intermediate_size": 8, "max_position_embeddings": 64}


def header(tensors: dict[str, Any] | bytes) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(2)


def config(**values: Any) -> bytes:
    return json.dumps(CONFIG | values).encode()


def many() -> bytes:
    return header({f"model.layers.0.{number}": TENSOR for number in range(90_000)})


def engine_of(files: int) -> dict[str, bytes]:
    """An engine for OpenVINO whose manifest names this number of files that are not there."""
    manifest = {"format": 1, "backend": "openvino", "checkpoint": "", "options": {}, "versions": {}, "platform": ""}
    manifest |= {"created": "", "files": {f"a{number}": {"size": 1, "sha256": ""} for number in range(files)}}
    own = {"openvino_model.xml": b"<net/>", "openvino_model.bin": b"0", "manifest.json": json.dumps(manifest).encode()}
    return {**own, "tokenizer.json": str(Tokenizer(BPE()).to_str()).encode(), "model.safetensors": b""}


# Made when they are needed: they have 500 MB in all.
HOSTILE: dict[str, Callable[[], dict[str, bytes]]] = {
    "10^12 layers": lambda: {"config.json": config(num_hidden_layers=10**12)},
    "20,000,000 layers": lambda: {"config.json": config(num_hidden_layers=20_000_000)},
    "10,000 layers of 2^31 experts": lambda: {"config.json": config(num_hidden_layers=10_000, num_local_experts=2**31)},
    "a layer of 5,000 digits": lambda: {"model.safetensors": header(LAYERS | {"layers." + "9" * 5000 + ".w": TENSOR})},
    "999,999 shards": lambda: {"model-000001-of-999999.safetensors": many(), "model.safetensors": b""},
    "16 MB of empty lists": lambda: {"config.json": b'{"a":[' + b"[]," * 5_000_000 + b"0]}"},
    "16 MB of keys": lambda: {"config.json": json.dumps({str(number): 0 for number in range(1_100_000)}).encode()},
    "100 MB of one text": lambda: {"model.safetensors": header(b'{"__metadata__":"' + b"x" * 100_000_000 + b'"}')},
    "8 MB of keys": lambda: {"config.json": config(**{f"{number:030}": 0 for number in range(200_000)})},
    "90,000 tensors": lambda: {"model.safetensors": many()},
    "a stretch without end": lambda: {"config.json": config(rope_scaling={"type": "linear", "factor": float("inf")})},
    "5,000 continued lines": lambda: {"serving.properties": b"a=" + b"1\\\n" * 5_000},
    "60 MB in a line": lambda: {"serving.properties": b"option.dtype=" + b"x" * 60_000_000},
    "lists in YAML": lambda: {"config.yaml": b"trt_llm:\n  build: [" + b"1," * 120_000 + b"]"},
    "an engine of 100,000 files": lambda: engine_of(100_000),
    "a tokenizer of 60 MB": lambda: {"tokenizer.json": b'{"model":{"vocab":{' + b'"a":1,' * 10_000_000 + b'"b":2}}}'},
}
OTHERS: dict[str, Callable[[Path], None]] = {
    "a FIFO": lambda folder: os.mkfifo(folder / "serving.properties"),
    "a device": lambda folder: (folder / "serving.properties").symlink_to("/dev/zero"),
}


QUIET = 200
"""Answers of /ping before all registrations, for comparison: the machine may be busy."""
MOST_SECONDS = 0.1
"""Processor time that the server may use during a /ping: what holds it up, on a busy machine too."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    for name in (*HOSTILE, *OTHERS):
        folder = store / name
        folder.mkdir()
        files = {"config.json": config(), "model.safetensors": header(LAYERS)} | HOSTILE.get(name, dict)()
        for file, content in files.items():
            if content:
                (folder / file).write_bytes(content)
        if name in OTHERS:
            OTHERS[name](folder)
    return store


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = scripted_model(tmp_path_factory.mktemp("first") / "model", {"steps_per_second": 100})
    cache = tmp_path_factory.mktemp("cache")
    with serving(model, SERVING_MODEL_STORE=str(store), DJL_CACHE_DIR=str(cache)) as server:
        yield server


class Pings(InBackground):
    """What each /ping took during the block."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.times = Times()
        super().__init__()

    def _run(self) -> None:
        pid = self.server.process.pid
        with httpx.Client(base_url=self.server.url, timeout=60, trust_env=False) as client:
            while not self._end.is_set():
                began, before = time.perf_counter(), cpu_seconds(pid)
                assert client.get("/ping").status_code == 200
                self.times.passed.append(time.perf_counter() - began)
                self.times.used.append(cpu_seconds(pid) - before)
                time.sleep(0.005)


@pytest.fixture(scope="module")
def quiet(server: Server) -> float:
    """The most seconds that /ping takes while nothing is registered."""
    return max(answers_of_ping(server).passed)


def answers_of_ping(server: Server) -> Times:
    with Pings(server) as pings:
        wait_until(lambda: len(pings.times.passed) >= QUIET)
    return pings.times


def register(server: Server, name: str, quiet: float, model_name: str = "m") -> tuple[httpx.Response, Times]:
    """The answer to the registration of a model, and what it did to /ping; prints both."""
    before = server.process.memory_info().rss
    with Pings(server) as pings:
        wait_until(lambda: bool(pings.times.passed))
        began = time.perf_counter()
        answer = server.http.post("/models", params={"url": name, "model_name": model_name})
        seconds = time.perf_counter() - began
    more = server.process.memory_info().rss - before
    times = pings.times
    print(
        f"{name:32} {answer.status_code} after {seconds:6.2f} s; {len(times.passed):4} /ping, p99.9 "
        f"{late(times.passed) * 1e3:5.0f} ms ({quiet * 1e3:3.0f} ms quiet), of the server's processor "
        f"{late(times.used) * 1e3:3.0f} ms; {more / 1e6:+5.0f} MB; {answer.text[-80:]!r}"
    )
    return answer, times


@pytest.mark.parametrize("name", [*HOSTILE, *OTHERS])
def test_a_model_that_would_cost_much_is_refused_while_the_server_answers(
    server: Server, quiet: float, name: str
) -> None:
    answer, times = register(server, name, quiet)
    assert 400 <= answer.status_code < 600 and len(answer.content) < 10_000
    assert late(times.used) <= MOST_SECONDS
    assert server.ping() == 200 and server.generate().status_code == 200


def test_a_model_with_a_large_tokenizer_is_served(server: Server, quiet: float, store: Path) -> None:
    """Its tokenizer is what the server has to make itself: in one call of the library, which holds up one /ping."""
    (store / LARGE).mkdir()
    (store / LARGE / "serving.properties").write_text("option.backend=scripted\noption.model_id=.\n")
    (store / LARGE / "config.json").write_bytes(config(vocab_size=300_000))
    (store / LARGE / "model.safetensors").write_bytes(header(LAYERS))
    (store / LARGE / "tokenizer.json").write_text(large_tokenizer())
    answer, times = register(server, LARGE, quiet, "large")
    assert answer.status_code == 200
    assert sorted(times.used)[-2] <= MOST_SECONDS
    assert server.http.delete("/models/large").status_code == 200
    answers_of_ping(server)  # freeing the tokenizer holds up one, which is not to be another test's


LARGE = "a tokenizer of 250,000 tokens"


def large_tokenizer() -> str:
    """As large as those of the largest vocabularies, 17 MB with as many merges as tokens."""
    letters = [chr(code) for code in range(33, 127)]
    pairs = [(first, last) for first in letters for last in letters]
    merges = pairs + [(first + last, letter) for first, last in pairs for letter in letters]
    merges = merges[:250_000]
    vocabulary = {token: id_ for id_, token in enumerate([*letters, *(first + last for first, last in merges)])}
    return str(Tokenizer(BPE(vocab=vocabulary, merges=merges)).to_str())
