"""Download a model from the Hugging Face hub into the hub's local cache."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.hub_files import HubFile, RepositoryFolder
from djl_trtllm.model.remote.progress import ProgressMeter, format_bytes
from djl_trtllm.model.remote.selection import needed

# As the hub's library has it: the parts of a name begin and end with a letter, a digit or _. What does not is a path.
_ID = re.compile(r"(?:\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b")
_SPARE_BYTES = 256 << 20
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_TOKEN_OPTION = "option.hf_access_token"  # noqa: S105  # its name, not a token
_TOKEN = re.compile(r"[!-~]+")
HUB_SCHEME = "hf://"
"""Marks a name as one of the hub where it could also be a local path."""
_LOGS_OF_REQUESTS = ("httpx", "httpcore", "urllib3")
"""Newer versions of huggingface_hub (1.0) use httpx, older ones requests."""
_NOT_REACHED = {"TransportError", "ConnectionError", "Timeout"}
"""Exceptions of both libraries if there is no response."""
_ADVICE = {
    "GatedRepoError": "it is gated: request access on its page with the account whose token is in {token} (a token "
    "with read access)",
    "RevisionNotFoundError": "it has no such branch, tag or commit (option.revision)",
    "RepositoryNotFoundError": "there is no such model, or it is private and {token} is not set or has no access to "
    "it; a local path must exist, and an S3 address begins with s3://",
    "LocalEntryNotFoundError": "it is not complete in the hub's cache, and the hub cannot be reached (or "
    "HF_HUB_OFFLINE is set): check the network, HF_ENDPOINT and HF_HOME",
}


def hub_id(text: str) -> str:
    """The repository that `owner/name` or `hf://owner/name` names. Raises DownloadError for other texts."""
    repository = text.removeprefix(HUB_SCHEME).rstrip("/")
    if not is_hub_id(repository):
        raise DownloadError(f"{text!r} is not the name of a model on the hub: expected owner/name")
    return repository


def is_hub_id(text: str) -> bool:
    """Whether the text can be the name of a hub repository (`owner/name`, or a bare `name`)."""
    return bool(_ID.fullmatch(text)) and "--" not in text and ".." not in text and not text.endswith(".git")


def download_from_hub(
    repository: str,
    progress: Callable[[str], None],
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    token: str | None = None,
    select: Callable[[Iterable[str]], list[str]] = needed,
) -> Path:
    """The files of a repository that `select` chooses, in a directory of the hub's cache.

    Branches are looked up each time. Files in the cache are not downloaded again, and an interrupted download continues
    where it stopped. Each new file is compared once with the hub's checksum and removed if it differs. `cache_dir`
    defaults to the hub's own (HF_HOME). HF_TOKEN, which comes before `token`, HF_ENDPOINT and HF_HUB_OFFLINE are
    honoured. Raises DownloadError with the repository and what to do.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    cache = cache_dir or Path(constants.HF_HUB_CACHE)
    where = repository if revision is None else f"{repository} at {revision}"

    token = used_token(token)

    def fetch(**arguments: Any) -> Path:
        return Path(snapshot_download(repository, revision=revision, cache_dir=cache, token=token, **arguments))

    try:
        check_token(token)
        if constants.HF_HUB_OFFLINE:
            progress(f"HF_HUB_OFFLINE is set: taking {where} from the hub's cache")
            return fetch(local_files_only=True, allow_patterns=_wanted_offline(repository, revision, cache, select))
        _quieten()
        commit, files = list_files(repository, revision, select, token)
        folder = RepositoryFolder(cache / repo_folder_name(repo_id=repository, repo_type="model"))
        missing = folder.missing_bytes(commit, files)
        _check_room(missing, cache)
        wanted = [_literal(name) for name in files]
        total = sum(file.size for file in files.values())
        if not missing:
            progress(f"{where} is in the hub's cache: {len(files)} files, {format_bytes(total)}")
            found = fetch(allow_patterns=wanted)
        else:
            kept = f", {format_bytes(total - missing)} of them here already" if missing < total else ""
            progress(f"downloading {where} from {constants.ENDPOINT}: {len(files)} files, {format_bytes(total)}{kept}")
            with ProgressMeter(f"downloading {where}", missing, progress) as meter, folder.watched(meter):
                found = fetch(allow_patterns=wanted)
        if found.name != commit:  # the branch has moved meanwhile
            _, files = list_files(repository, found.name, select, token)
        folder.check(where, found, files, progress)
        return found
    except Exception as error:
        raise DownloadError(f"cannot download {where} from the Hugging Face hub: {explain(error, token)}") from error


def used_token(token: str | None) -> str | None:
    """The token that a configuration names, or None where the environment has one, which the hub's library reads."""
    return None if any(os.environ.get(name, "").strip() for name in _TOKEN_VARIABLES) else token


def check_token(token: str | None) -> None:
    """Raises DownloadError for a text that no header can have. It is not shown."""
    if token is not None and not _TOKEN.fullmatch(token):
        raise DownloadError(
            f"{_TOKEN_OPTION} is not a token: expected letters, digits and signs without spaces, such as hf_...; copy "
            "it from Settings, Access Tokens of the hub"
        )


def _wanted_offline(
    repository: str, revision: str | None, cache: Path, select: Callable[[Iterable[str]], list[str]]
) -> list[str] | None:
    """Patterns of the files to download; None if the list of files is not in the cache.

    Without patterns newer versions of huggingface_hub (1.33) require every file of the repository in the cache.
    """
    import huggingface_hub
    from huggingface_hub import errors

    cached_tree = getattr(huggingface_hub, "get_cached_repo_tree", None)
    if cached_tree is None:
        return None
    try:
        tree = cached_tree(repository, revision=revision, cache_dir=cache)
    except getattr(errors, "CachedRepoTreeNotFoundError", OSError):
        return None
    return [_literal(name) for name in select(file.path for file in tree)]


def _quieten() -> None:
    """Silence the hub's library: progress and errors are reported here, one per line.

    The library draws progress bars into logs, and HTTP clients log every request with its signed address.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    for client in map(logging.getLogger, _LOGS_OF_REQUESTS):
        if client.level == logging.NOTSET:
            client.setLevel(logging.WARNING)


def list_files(
    repository: str, revision: str | None, select: Callable[[Iterable[str]], list[str]], token: str | None
) -> tuple[str, dict[str, HubFile]]:
    """The commit, and the files to download by path."""
    from huggingface_hub import HfApi

    info = HfApi(token=token).model_info(repository, revision=revision, files_metadata=True)
    files = {
        file.rfilename: HubFile.listed(file.size, None if file.lfs is None else file.lfs.sha256, file.blob_id)
        for file in info.siblings or ()
    }
    chosen = {name: files[name] for name in select(files)}
    if not chosen:
        raise DownloadError("it has no files that can be served")
    return info.sha or "", chosen


def _check_room(missing: int, cache: Path) -> None:
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if missing and missing + _SPARE_BYTES > free:
        raise DownloadError(
            f"{format_bytes(missing)} are still missing, and {format_bytes(free)} are free on the disk of {cache} "
            f"({format_bytes(_SPARE_BYTES)} stay free): free some space, or set HF_HOME to a larger disk"
        )


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def explain(error: Exception, token: str | None = None) -> str:
    """What happened and what to do; `token` is the one of the configuration, if that one was used."""
    text = _explained(error, "HF_TOKEN" if token is None else _TOKEN_OPTION)
    return text.replace(token, _TOKEN_OPTION) if token else text


def _explained(error: Exception, token_name: str) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, DownloadError):
        return str(error)
    names = [base.__name__ for base in type(error).__mro__]
    advice = next((_ADVICE[name] for name in names if name in _ADVICE), None)
    if advice is not None:
        return advice.format(token=token_name)
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status == 401:
            return f"{token_name} is not valid: create a new one under Settings, Access Tokens"
        return f"the hub answered with status {status} ({str(error).splitlines()[0]})"
    said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if not _NOT_REACHED.isdisjoint(names):
        return f"no connection to {constants.ENDPOINT} ({said}): check the network, proxies and HF_ENDPOINT"
    return said
