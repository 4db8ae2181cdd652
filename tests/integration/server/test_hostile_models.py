"""Models whose files would cost the server minutes or gigabytes are refused while it answers.

docs/verification.md has what each costs.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import Pinging
from tests.support.models import scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server, serving

TENSOR = {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}
LAYERS = {f"model.layers.{layer}.weight": TENSOR for layer in (0, 1)}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
CONFIG |= {"num_attention_heads": 4, "vocab_size": 9, "intermediate_size": 8, "max_position_embeddings": 64}


def header(tensors: dict[str, Any] | bytes) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(2)


def config(**values: Any) -> bytes:
    return json.dumps(CONFIG | values).encode()


MANY = {f"model.layers.0.{number}": TENSOR for number in range(90_000)}
HOSTILE: dict[str, dict[str, bytes]] = {
    "a billion layers": {"config.json": config(num_hidden_layers=10**9)},
    "10,000 layers of 2^31 experts": {"config.json": config(num_hidden_layers=10_000, num_local_experts=2**31)},
    "a layer of 5,000 digits": {"model.safetensors": header(LAYERS | {"layers." + "9" * 5000 + ".w": TENSOR})},
    "999,999 shards": {"model-000001-of-999999.safetensors": header(MANY), "model.safetensors": b""},
    "16 MB of empty lists": {"config.json": b'{"a":[' + b"[]," * 5_000_000 + b"0]}"},
    "16 MB of keys": {"config.json": json.dumps({str(number): 0 for number in range(1_100_000)}).encode()},
    "100 MB of one text": {"model.safetensors": header(b'{"__metadata__":"' + b"x" * 100_000_000 + b'"}')},
    "8 MB of keys": {"config.json": config(**{f"{number:030}": 0 for number in range(200_000)})},
    "90,000 tensors": {"model.safetensors": header(MANY)},
    "a stretch without end": {"config.json": config(rope_scaling={"type": "linear", "factor": float("inf")})},
    "5,000 continued lines": {"serving.properties": b"a=" + b"1\\\n" * 5_000},
    "60 MB in a line": {"serving.properties": b"option.dtype=" + b"x" * 60_000_000},
    "lists in YAML": {"config.yaml": b"trt_llm:\n  build: [" + b"1," * 120_000 + b"]"},
    "a tokenizer of 60 MB": {"tokenizer.json": b'{"model":{"vocab":{' + b'"a":1,' * 10_000_000 + b'"b":2}}}'},
}
OTHERS: dict[str, Callable[[Path], None]] = {
    "a FIFO": lambda folder: os.mkfifo(folder / "serving.properties"),
    "a device": lambda folder: (folder / "serving.properties").symlink_to("/dev/zero"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    for name in (*HOSTILE, *OTHERS):
        folder = store / name
        folder.mkdir()
        files = {"config.json": config(), "model.safetensors": header(LAYERS)} | HOSTILE.get(name, {})
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HOSTILE, *OTHERS])
def test_a_model_that_would_cost_much_is_refused_while_the_server_answers(server: Server, name: str) -> None:
    before = server.process.memory_info().rss
    with Pinging(server) as pinging:
        wait_until(lambda: bool(pinging.seen))
        answer = server.http.post("/models", params={"url": name, "model_name": "m"})
    print(f"{name:32} {answer.status_code}; {(server.process.memory_info().rss - before) / 1e6:+5.0f} MB")
    assert set(pinging.statuses) == {200}
    assert 400 <= answer.status_code < 600 and len(answer.content) < 10_000
    assert server.ping() == 200 and server.generate().status_code == 200
