"""Measured points: how fast a model was on a machine under a load, in a file that a user may read, edit and delete."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from djl_trtllm.errors import SizingError
from djl_trtllm.files import read_file
from djl_trtllm.sizing.checkpoint import CheckpointSizes

FILE_NAME = "points.jsonl"
_MOST_BYTES = 1 << 21

ENGINES: Mapping[str, str] = {
    "tensorrt": "tensorrt_llm",
    "pytorch": "tensorrt_llm",
    "autodeploy": "tensorrt_llm",
    "vllm": "vllm",
    "openvino": "openvino",
}
"""The engines of points by values of option.backend."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10**7)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The speed of one model on one machine under one load, in seconds and tokens per second: a line of the file.

    {"model": "1f0c...", "name": "llama-8b", "engine": "vllm", "version": "0.26.0", "gpu": "H100", "gpus": 1,
     "precision": "bfloat16", "isl": 114, "osl": 256, "clients": 256, "tokens_per_second": 18681.0, ...}

    The file is `points.jsonl` in the engine cache (`Config.engine_cache_dir`). `bench --record` and `versus` write
    points, `size` and `advise` correct their predictions by them. Of points of the same model, engine, GPUs, precision
    and load the last one counts.
    """

    model: _Name  # `fingerprint` of the checkpoint
    name: _Name  # the model as it was named, for readers
    engine: _Name  # one of ENGINES
    version: Annotated[str, msgspec.Meta(max_length=100)]  # the engine's, "" if it is unknown
    gpu: _Name  # a name of `gpus.toml`; another name, such as that of a CPU, corrects nothing
    gpus: _Count
    precision: _Name  # `precision_of` the weights and the KV cache, such as `fp8`
    isl: _Count
    osl: _Count
    clients: _Count  # requests that ran at a time
    tokens_per_second: _Positive  # output tokens of all clients
    command: Annotated[str, msgspec.Meta(max_length=2000)]
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    ttft_p50: _Positive | None = None

    @property
    def origin(self) -> str:
        """The origin of the point, as `vllm 0.26.0, djl-trtllm bench ..., 2026-11-27`."""
        return f"{f'{self.engine} {self.version}'.strip()}, {self.command}, {self.date}"


def fingerprint(sizes: CheckpointSizes) -> str:
    """A key of everything in a checkpoint but precision that decides its speed: equal if layers have the same sizes."""
    shape = sizes.shape
    numbers = (shape.num_layers, shape.hidden, shape.num_heads, shape.head_dim, shape.intermediate, shape.vocab_size)
    text = repr((numbers, sizes.experts, sizes.experts_per_token, sizes.layers))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def precision_of(sizes: CheckpointSizes, quantization: str | None = None, kv_dtype: str | None = None) -> str:
    """The weights' format, then the KV cache's if it is quantised: `bfloat16`, `fp8`, `fp8, kv fp8`.

    `quantization` and `kv_dtype` are applied while the model is loaded; None or `auto` leaves what is stored.
    """
    weights = quantization or sizes.quantization or sizes.shape.dtype or "bfloat16"
    cache = sizes.kv_quantization if kv_dtype in (None, "auto") else kv_dtype
    return weights.lower() + (f", kv {cache.lower()}" if cache else "")


def read_points(folder: Path) -> list[Point]:
    """The points in `folder`, newest first; none if there is no file. Raises SizingError for a file of another kind."""
    place, found = str(folder / FILE_NAME), list[Point]()
    try:
        for number, line in enumerate(read_file(folder / FILE_NAME, _MOST_BYTES).splitlines(), 1):
            place = f"{folder / FILE_NAME}:{number}"
            if line.strip():
                found.append(msgspec.json.decode(line, type=Point))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise SizingError(f"the measured points, {place}, cannot be read: {error}; correct or delete that") from None
    return found[::-1]


def write_point(folder: Path, point: Point) -> None:
    """Add a point to the file in `folder`.

    Raises SizingError for a point out of bounds, for a file that is not one of points, and if it cannot be written.
    """
    path, content = folder / FILE_NAME, msgspec.json.encode(point)
    try:
        msgspec.json.decode(content, type=Point)
        folder.mkdir(parents=True, exist_ok=True)
        read_points(folder)
        # One write at the end: runs that end at the same moment lose no point. A user's last line may have no end.
        with path.open("ab", buffering=0) as file:
            file.write(b"\n" + content)
    except msgspec.ValidationError as error:
        raise SizingError(f"the measurement cannot be kept: {error}") from None
    except OSError as error:
        advice = "set option.engine_cache_dir to a writable folder"
        raise SizingError(f"the measured points, {path}, cannot be written: {error}; {advice}") from error
