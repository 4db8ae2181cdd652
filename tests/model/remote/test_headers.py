from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.headers import remote_headers
from tests.support.hub_server import Hub, hub_server
from tests.support.s3_server import Store

SECOND = 64 * 1024 * 1024


def weights(**tensors: list[int]) -> bytes:
    """A safetensors file in bf16 without its weights' bytes beyond 64: nothing may ask for them."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * at


FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": weights(a=[200, 1000]),
    "model-00002-of-00002.safetensors": weights(**{f"layer.{index}.{'x' * 200}": [1, 1] for index in range(2000)}),
    "adapter_model.safetensors": weights(c=[1, 1]),
}


def names(headers: Mapping[str, object]) -> list[str]:
    return sorted(headers)


def test_headers_in_s3_are_read_without_the_weights(store: Store, tmp_path: Path) -> None:
    for name, content in FILES.items():
        store.put(f"team/story/{name}", content)
    headers = remote_headers("s3://models/team/story", tmp_path)
    assert names(headers) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert headers["model-00001-of-00002.safetensors"]["a"]["shape"] == [200, 1000]
    assert len(headers["model-00002-of-00002.safetensors"]) == 2000
    asked = [request.end - request.start for request in store.requests if request.method == "GET" and request.key]
    # The first file's 400,000 bytes are more than what is asked for at first; the second has a long header.
    assert max(asked) < 600_000
    assert sorted(asked)[:2] == [256 * 1024, 256 * 1024]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a whole safetensors file"),
        ((10**9).to_bytes(8, "little") + b"{}", "not a whole safetensors file"),
        ((4).to_bytes(8, "little") + b"[}]!", "damaged header"),
        ((2).to_bytes(8, "little") + b"[]", "damaged header"),
    ],
)
def test_a_damaged_file_in_s3_is_an_error_with_its_address(
    store: Store, tmp_path: Path, content: bytes, says: str
) -> None:
    store.put("team/story/model.safetensors", content)
    with pytest.raises(DownloadError, match=f"s3://models/team/story/model.safetensors .*{says}"):
        remote_headers("s3://models/team/story", tmp_path)


def on_the_hub(endpoint: str, home: Path, code: str) -> str:
    """What a program prints that has this hub: the hub's library reads its address when it is imported."""
    program = f"from pathlib import Path\nfrom djl_trtllm.model.remote.headers import remote_headers\n{code}"
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_headers_on_the_hub_are_read_with_ranges_and_from_files_that_are_here(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(weights(local=[1, 1]))
    hub = Hub({"acme/story": dict(FILES)})
    with hub_server(hub) as endpoint:
        code = (
            f"found = remote_headers('acme/story', Path({str(tmp_path)!r}))\n"
            "print(sorted(found), list(found['model-00001-of-00002.safetensors']))\n"
            "print(len(found['model-00002-of-00002.safetensors']))"
        )
        said = on_the_hub(endpoint, tmp_path / "home", code)
    assert said.splitlines() == [
        "['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'] ['local']",
        "2000",
    ]
    assert hub.fetched == ["model-00002-of-00002.safetensors"] * 2


def test_a_model_that_is_not_on_the_hub_is_an_error_with_advice(tmp_path: Path) -> None:
    with hub_server(Hub({})) as endpoint:
        said = on_the_hub(endpoint, tmp_path / "home", f"remote_headers('acme/none', Path({str(tmp_path)!r}))")
    assert "DownloadError: cannot read the sizes of acme/none from the hub: there is no such model" in said
