"""The headers of a remote model's safetensors files, by requests for their first bytes: no weights are downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.hub import explain, hub_id, list_files, used_token
from djl_trtllm.model.remote.s3 import S3Address, is_s3
from djl_trtllm.model.remote.selection import needed
from djl_trtllm.model.weights import MOST_HEADER_BYTES, find_weights, read_header

Header = Mapping[str, Any]
_FIRST = 256 * 1024
"""Bytes of the first request, which is enough for the header of most files."""
_READERS = 16


def remote_headers(
    text: str, directory: Path, *, revision: str | None = None, hub_token: str | None = None
) -> dict[str, Header]:
    """The headers of the weight files of an S3 address or hub id, by file name; empty without safetensors files.

    `directory` is what `fetch(..., config_only=True)` returned; weight files in it are read. Raises DownloadError.
    """
    return _of_s3(S3Address.parse(text)) if is_s3(text) else _of_hub(hub_id(text), directory, revision, hub_token)


def _of_hub(repository: str, directory: Path, revision: str | None, token: str | None) -> dict[str, Header]:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        present = [file for file in find_weights(directory) if file.suffix == ".safetensors"]
        return {file.name: read_header(file) for file in present}
    token = used_token(token)
    api = HfApi(token=token)

    def read(name: str) -> Header:
        if (directory / name).is_file():
            return read_header(directory / name)
        found = api.parse_safetensors_file_metadata(repository, name, revision=commit)
        return {
            tensor: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
            for tensor, info in found.tensors.items()
        }

    try:
        commit, files = list_files(repository, revision, needed, token)
        return _read_all(_weights(files), read)
    except DownloadError:
        raise
    except Exception as error:
        raise DownloadError(f"cannot read the sizes of {repository} from the hub: {explain(error, token)}") from error


def _of_s3(address: S3Address) -> dict[str, Header]:
    # Importing botocore takes a third of a second.
    from djl_trtllm.model.remote import s3
    from djl_trtllm.model.remote.s3_download import list_objects

    objects = {found.name: found for found in list_objects(address)}

    def get(key: str, start: int, end: int) -> bytes:
        with s3.download_errors(f"s3://{address.bucket}/{key}"):
            answer = s3.client().get_object(Bucket=address.bucket, Key=key, Range=f"bytes={start}-{end - 1}")
            return bytes(answer["Body"].read())

    def read(name: str) -> Header:
        found = objects[name]
        return _parse(f"s3://{address.bucket}/{found.key}", found.size, lambda start, end: get(found.key, start, end))

    return _read_all(_weights(objects), read)


def _weights(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors") and "/" not in name and "adapter" not in name]


def _read_all(names: list[str], read: Callable[[str], Header]) -> dict[str, Header]:
    with ThreadPoolExecutor(_READERS) as readers:
        return dict(zip(names, readers.map(read, names), strict=True))


def _parse(where: str, size: int, get: Callable[[int, int], bytes]) -> Header:
    """The header of a file of `size` bytes, of which `get` returns the bytes from a start to an end."""
    content = get(0, min(_FIRST, size)) if size else b""
    length = int.from_bytes(content[:8], "little")
    if size < 8 or length > min(MOST_HEADER_BYTES, size - 8):
        raise DownloadError(f"{where} is not a whole safetensors file ({size:,} bytes): upload it again")
    if len(content) < 8 + length:
        content += get(len(content), 8 + length)
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise DownloadError(f"{where} has a damaged header ({error}): upload it again") from error
    if not isinstance(header, dict):
        raise DownloadError(f"{where} has a damaged header (no object): upload it again")
    return header
