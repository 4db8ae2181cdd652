"""The file of measured points."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.points import FILE_NAME, Point, fingerprint, precision_of, read_points, write_point

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
POINT = Point(
    model="0123456789abcdef",
    name="llama-8b",
    engine="vllm",
    version="0.26.0",
    gpu="H100",
    gpus=1,
    precision="bfloat16",
    isl=114,
    osl=256,
    clients=256,
    tokens_per_second=18681.0,
    ttft_p50=0.461,
    itl=0.0129,
    command="djl-trtllm bench",
    date="2026-11-26",
)


def _with(**values: object) -> Point:
    return msgspec.structs.replace(POINT, **values)


def test_points_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert read_points(folder) == []
    path = write_point(folder, POINT)
    write_point(folder, _with(clients=64, tokens_per_second=9000.5))
    assert path == folder / FILE_NAME
    assert read_points(folder) == [POINT, _with(clients=64, tokens_per_second=9000.5)]


def test_the_same_load_measured_again_replaces_the_earlier_point(tmp_path: Path) -> None:
    again = _with(tokens_per_second=1.0, date="2026-11-27", command="again", ttft_p50=None)
    for point in (POINT, _with(version="0.27.0"), again):
        write_point(tmp_path, point)
    assert read_points(tmp_path) == [_with(version="0.27.0"), again]


def test_a_user_may_edit_the_file(tmp_path: Path) -> None:
    path = write_point(tmp_path, POINT)
    path.write_bytes(b"\n\n" + path.read_bytes().replace(b"18681.0", b"5.5").strip())
    write_point(tmp_path, _with(clients=64))
    assert read_points(tmp_path) == [_with(tokens_per_second=5.5), _with(clients=64)]


def test_writers_at_the_same_moment_lose_no_point(tmp_path: Path) -> None:
    writers = [threading.Thread(target=write_point, args=(tmp_path, _with(clients=number + 1))) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(point.clients for point in read_points(tmp_path)) == list(range(1, 9))


@pytest.mark.parametrize(
    "values",
    [
        {"tokens_per_second": 0.0},
        {"tokens_per_second": float("nan")},
        {"tokens_per_second": float("inf")},
        {"clients": 0},
        {"gpu": ""},
        {"name": "m" * 301},
        {"date": "yesterday"},
        {"itl": -1.0},
    ],
)
def test_a_point_out_of_bounds_is_refused_and_the_file_stays(tmp_path: Path, values: dict[str, object]) -> None:
    write_point(tmp_path, POINT)
    with pytest.raises(SizingError, match=next(iter(values))):
        write_point(tmp_path, _with(**values))
    assert read_points(tmp_path) == [POINT]


_ENTRY = msgspec.to_builtins(POINT)


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{",
        b"{}",
        b"[" * 100_000,
        msgspec.json.encode(_ENTRY) + b"\n" + msgspec.json.encode(_ENTRY | {"clients": "many"}),
        msgspec.json.encode(_ENTRY | {"tokens_per_second": -1}),
        msgspec.json.encode(_ENTRY | {"other": 1}),
        b" " * (1 << 22),
    ],
    ids=["list", "cut", "no-fields", "deep", "type", "bound", "unknown", "large"],
)
def test_a_file_of_another_kind_is_an_error_that_names_it_and_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(content)
    for use in (lambda: read_points(tmp_path), lambda: write_point(tmp_path, POINT)):
        with pytest.raises(SizingError, match=f"{path}.*delete that"):
            use()
    assert path.read_bytes() == content


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SizingError, match="engine_cache_dir"):
        write_point(tmp_path / "file", POINT)


def test_a_fingerprint_is_of_the_sizes_that_decide_speed() -> None:
    def of(**values: object) -> str:
        return fingerprint(CheckpointSizes.from_config(LLAMA | values))

    assert of() == of(torch_dtype="float16") == of(model_type="mistral")
    others = ("num_hidden_layers", "hidden_size", "num_key_value_heads", "intermediate_size", "vocab_size")
    assert len({of(), *(of(**{name: LLAMA[name] // 2}) for name in others), of(sliding_window=4096)}) == 7


@pytest.mark.parametrize(
    ("stored", "quantization", "kv_dtype", "precision"),
    [
        ({}, None, None, "bfloat16"),
        ({}, "fp8", "auto", "fp8"),
        ({}, "fp8", "fp8", "fp8, kv fp8"),
        ({"quantization_config": {"quant_method": "fp8"}}, None, None, "fp8"),
    ],
)
def test_a_precision_is_of_what_is_stored_and_what_is_applied(
    stored: dict[str, object], quantization: str | None, kv_dtype: str | None, precision: str
) -> None:
    assert precision_of(CheckpointSizes.from_config(LLAMA | stored), quantization, kv_dtype) == precision
