"""Upload a directory to S3 or to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.hub import HUB_SCHEME, hub_id
from djl_trtllm.model.remote.progress import ProgressMeter, format_bytes
from djl_trtllm.model.remote.s3 import S3Address, is_s3


def is_remote_destination(text: str) -> bool:
    """Whether the text is an `s3://` address or `hf://owner/name`; anything else is a local path.

    Raises DownloadError for what is neither, but begins like one.
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


def upload_file(path: Path, address: S3Address, progress: Callable[[str], None]) -> None:
    _files_to_s3({path: address.key}, address, progress)


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

    from djl_trtllm.model.remote.hub import check_token, explain, used_token

    token = used_token(token)
    check_token(token)

    progress(f"uploading to {repository} on the hub (private, where it is new)")
    try:
        api = HfApi(token=token)
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory)
    except Exception as error:
        raise DownloadError(f"cannot upload {directory} to {repository}: {explain(error, token)}") from error
