"""Turn `option.model_id` or `HF_MODEL_ID` into a local path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from djl_trtllm.model.remote.hub import HUB_SCHEME, download_from_hub, hub_id, is_hub_id
from djl_trtllm.model.remote.s3 import S3Address, is_s3
from djl_trtllm.model.remote.selection import config_files, served_files, tokenizer_files


def is_remote(text: str) -> bool:
    """Whether the text names something to download: an S3 address, or a hub id that is not a local path."""
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
    return download_from_hub(
        hub_id(text), progress, revision=revision, cache_dir=hub_cache, token=hub_token, select=select
    )
