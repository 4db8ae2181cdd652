"""A model on the Hugging Face hub, in the hub's own local cache."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.progress import shown
from djl_trtllm.model.remote.selection import needed

_ID = re.compile(r"(?:[\w.-]{1,96}/)?[\w.-]{1,96}")
_SPARE_BYTES = 256 << 20
HUB_SCHEME = "hf://"
"""Says that a name is one of the hub where it could be a local path as well."""


def hub_id(text: str) -> str:
    """The repository that `owner/name` or `hf://owner/name` names. Raises DownloadError for what cannot be one."""
    repository = text.removeprefix(HUB_SCHEME).rstrip("/")
    if not is_hub_id(repository):
        raise DownloadError(f"{text!r} is not the name of a model on the hub: expected owner/name")
    return repository


def is_hub_id(text: str) -> bool:
    """Whether the text can be the name of a repository on the hub (`owner/name`, or a bare `name`)."""
    return bool(_ID.fullmatch(text)) and "--" not in text and ".." not in text and not text.endswith(".git")


def download_from_hub(
    repository: str, tell: Callable[[str], None], *, revision: str | None = None, cache_dir: Path | None = None
) -> Path:
    """The files of a repository that serving needs, in a directory of the hub's cache.

    Branches are looked up each time, files that are here are not fetched again, and a broken download goes on where it
    stopped. `cache_dir` defaults to the hub's own (HF_HOME). HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured.
    Raises DownloadError that names the repository and what to do.
    """
    from huggingface_hub import constants, snapshot_download

    def fetch(**arguments: Any) -> Path:
        return Path(snapshot_download(repository, revision=revision, cache_dir=cache_dir, **arguments))

    where = repository if revision is None else f"{repository} at {revision}"
    try:
        if constants.HF_HUB_OFFLINE:
            tell(f"HF_HUB_OFFLINE is set: taking {where} from the hub's cache")
            return fetch(local_files_only=True)
        files = _listed(repository, revision)
        _check_room(where, files, cache_dir or Path(constants.HF_HUB_CACHE))
        tell(f"fetching {where} from the hub: {len(files)} files, {shown(sum(files.values()))}; those here are kept")
        return fetch(allow_patterns=[_literal(name) for name in files])
    except Exception as error:
        raise DownloadError(f"{where} cannot be had from the Hugging Face hub: {explain(error)}") from error


def _listed(repository: str, revision: str | None) -> dict[str, int]:
    """Path and bytes of the files to fetch."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = {name: sizes[name] for name in needed(sizes)}
    if not files:
        raise DownloadError("it has no files that could be served")
    return files


def _check_room(where: str, files: dict[str, int], cache: Path) -> None:
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    # What is here already is not counted: only the largest file tells that nothing can be done.
    largest = max(files.values())
    if largest + _SPARE_BYTES > free:
        raise DownloadError(
            f"a file of it has {shown(largest)}, and {shown(free)} are free on the disk of {cache}: make room, or set "
            "HF_HOME to a larger disk"
        )


def _literal(name: str) -> str:
    """A pattern for exactly this name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def explain(error: Exception) -> str:
    """What the hub's answer means, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, DownloadError):
        return str(error)
    if isinstance(error, errors.GatedRepoError):
        return (
            "access to it has to be asked for on its page, with the account whose token is in HF_TOKEN (a token with "
            "read access)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such branch, tag or commit (option.revision)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "there is no such model, or it is private and HF_TOKEN is not set or has no access to it; a local path has "
            "to exist, and an S3 address begins with s3://"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "it is not whole in the hub's cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set): look at the "
            "network, HF_ENDPOINT and HF_HOME"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status == 401:
            return "HF_TOKEN is not valid: make a new one under Settings, Access Tokens"
        return f"the hub answered with status {status} ({str(error).splitlines()[0]})"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
