"""Download what `option.model_id` or `HF_MODEL_ID` names, and upload directories, to and from S3 and the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.checkpoint import find_weights, parse_header, read_header
from djl_trtllm.model.remote.hub import (
    HUB_SCHEME,
    check_token,
    config_files,
    download_from_hub,
    explain,
    hub_id,
    is_hub_id,
    list_files,
    needed,
    served_files,
    tokenizer_files,
    used_token,
)
from djl_trtllm.model.remote.s3 import S3Address, is_s3
from djl_trtllm.progress import ProgressMeter, format_bytes


def is_remote(text: str) -> bool:
    """Return whether the text names something to download: an S3 address, or a hub id that is not a local path."""
    return is_s3(text) or text.startswith(HUB_SCHEME) or (not Path(text).exists() and is_hub_id(text))


def fetch(
    text: str,
    downloads: Path,
    progress: Callable[[str], None],
    *,
    revision: str | None = None,
    hub_cache: Path | None = None,
    hub_token: str | None = None,
    tokenizer_only: bool = False,
    config_only: bool = False,
) -> Path:
    """The local directory (or archive) of a model in S3 or on the hub; see `is_remote`.

    `downloads` is the folder for downloads from S3; `hub_cache` replaces the hub's own cache, and `hub_token`
    is its token where the environment has none. With `tokenizer_only` the
    weights are not downloaded, with `config_only` only the files that describe the model (an archive whole). Raises
    DownloadError.
    """
    select = config_files if config_only else tokenizer_files if tokenizer_only else served_files
    if is_s3(text):
        # Importing botocore takes a third of a second; models on the hub do not need it.
        from djl_trtllm.model.remote.s3_download import download

        address = S3Address.parse(text)
        # One folder per selection, because a download removes earlier versions of its address.
        folder = downloads / ("s3-config" if config_only else "s3-tokenizers" if tokenizer_only else "s3")
        found = download(address, folder, progress, select=select)
        single = found / address.key.rpartition("/")[2]
        return single if single.is_file() else found
    # `story`, or `models/story` where there is a folder of that name.
    as_path = not text.startswith(HUB_SCHEME) and Path(text).parent.is_dir()
    if as_path:
        progress(f"there is no directory {text} here: it is looked for on the Hugging Face hub")
    try:
        return download_from_hub(
            hub_id(text), progress, revision=revision, cache_dir=hub_cache, token=hub_token, select=select
        )
    except DownloadError as error:
        if not as_path:
            raise
        raise DownloadError(f"there is no directory {text} here; {error}") from error


# -- headers of weight files -------------------------------------------------------------------------------------------

Header = Mapping[str, Any]
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
    from djl_trtllm.model.remote import s3
    from djl_trtllm.model.remote.s3_download import list_objects

    objects = {found.name: found for found in list_objects(address)}

    def read(name: str) -> Header:
        key, size = objects[name].key, objects[name].size
        where = f"s3://{address.bucket}/{key}"

        def get(start: int, end: int) -> bytes:
            with s3.download_errors(where):
                answer = s3.client().get_object(Bucket=address.bucket, Key=key, Range=f"bytes={start}-{end - 1}")
                return bytes(answer["Body"].read())

        return parse_header(where, size, get, DownloadError, "upload it again")

    return _read_all(_weights(objects), read)


def _weights(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors") and "/" not in name and "adapter" not in name]


def _read_all(names: list[str], read: Callable[[str], Header]) -> dict[str, Header]:
    with ThreadPoolExecutor(_READERS) as readers:
        return dict(zip(names, readers.map(read, names), strict=True))


# -- upload ------------------------------------------------------------------------------------------------------------


def is_remote_destination(text: str) -> bool:
    """Return whether the text is an `s3://` address or `hf://owner/name`; anything else is a local path.

    Raises DownloadError for a text that begins like one of them and is malformed.
    """
    if is_s3(text):
        S3Address.parse(text)
    elif text.startswith(HUB_SCHEME):
        hub_id(text)
    else:
        return False
    return True


def upload(
    directory: Path,
    destination: str,
    progress: Callable[[str], None],
    *,
    last: str | None = None,
    hub_token: str | None = None,
) -> None:
    """Upload all files of a directory. The file `last` is uploaded after all others.

    A hub repository is created as private if it does not exist; `hub_token` is the hub's token where the environment
    has none. Raises DownloadError.
    """
    if not is_s3(destination):
        _to_hub(directory, hub_id(destination), progress, hub_token)
        return
    address = S3Address.parse(destination)
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    files.sort(key=lambda path: path.name == last)
    _files_to_s3({path: address.below(path.relative_to(directory).as_posix()) for path in files}, address, progress)


def _files_to_s3(files: dict[Path, str], address: S3Address, progress: Callable[[str], None]) -> None:
    from boto3.exceptions import S3UploadFailedError
    from boto3.s3.transfer import S3Transfer, TransferConfig, create_transfer_manager

    from djl_trtllm.model.remote import s3

    settings = TransferConfig(max_concurrency=16, multipart_chunksize=64 << 20, multipart_threshold=64 << 20)
    total = sum(path.stat().st_size for path in files)
    progress(f"uploading to {address}: {len(files)} files, {format_bytes(total)}")
    with (
        s3.download_errors(address),
        ProgressMeter(f"uploading to {address}", total, progress) as meter,
        S3Transfer(manager=create_transfer_manager(s3.client(), settings)) as transfer,
    ):
        for path, key in files.items():
            try:
                transfer.upload_file(str(path), address.bucket, key, callback=meter.add)
            except S3UploadFailedError as error:
                # boto3 raises this one while it handles the store's response, which says more.
                if error.__context__ is not None:
                    raise error.__context__ from None
                raise DownloadError(f"{address}: {error}") from error


def _to_hub(directory: Path, repository: str, progress: Callable[[str], None], token: str | None) -> None:
    from huggingface_hub import HfApi

    token = used_token(token)
    check_token(token)

    progress(f"uploading to {repository} on the hub (private, where it is new)")
    try:
        api = HfApi(token=token)
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory)
    except Exception as error:
        raise DownloadError(f"cannot upload {directory} to {repository}: {explain(error, token)}") from error
