"""Download what `option.model_id` or `HF_MODEL_ID` names, and upload directories, to and from S3 and the hub."""

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from djl_trtllm.config.compat.detect import CONFIGURATION_SUFFIXES
from djl_trtllm.config.compat.truss import TRUSS_REPOSITORY
from djl_trtllm.errors import DownloadError
from djl_trtllm.files import read_table, write_whole
from djl_trtllm.model.archive import ARCHIVE_SUFFIXES
from djl_trtllm.model.checkpoint import Header, StoredTensor, bounded, find_weights, parse_header, read_header
from djl_trtllm.model.remote.s3 import PATIENCE_SECONDS, S3Address, is_s3
from djl_trtllm.model.work_directory import shortage
from djl_trtllm.progress import ProgressMeter, format_bytes

# -- the files that are needed -----------------------------------------------------------------------------------------

_SAFETENSORS = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth")
_FOREIGN = (".msgpack", ".h5", ".ot", ".onnx", ".onnx_data", ".gguf", ".ggml", ".tflite", ".mlmodel", ".pb", ".nemo")
_MEDIA = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".mp4", ".pdf", ".ipynb")
# Copies of the weights in other formats, beside the checkpoint's own.
_COPIES = frozenset({"original", "onnx", "openvino", "coreml", "tf", "flax", "gguf", "metal", "runs", "logs"})
_CONFIGURATION = frozenset(
    {
        "config.json",
        "config.pbtxt",
        "config.yaml",
        "generation_config.json",
        "hf_quant_config.json",
        "modules.json",
        "preprocessor_config.json",
        "processor_config.json",
        "sentence_bert_config.json",
        "serving.properties",
        "tokenizer_config.json",
    }
)
_ENGINE_FOLDERS = frozenset(
    PurePosixPath(folder) for folder in (".", "1", "engine", "tensorrt_llm/1", TRUSS_REPOSITORY / "tensorrt_llm" / "1")
)
"""Folders in which `model.layout` looks for a compiled engine."""
_INDEX = ".index.json"
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def needed(names: Iterable[str]) -> list[str]:
    """The files to download from a repository, given the paths of all its files; sorted.

    A compiled engine needs all its files. A checkpoint needs configuration, tokenizer, code and one set of weights:
    safetensors are preferred to pickled files, and shards to their consolidated copy. Other libraries' formats,
    pictures, hidden files and leftovers of training are never needed.
    """
    paths = sorted({PurePosixPath(name) for name in names if name and not name.endswith("/")})
    kept = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    engines = {path.parent for path in kept if _is_engine(path) and not _COPIES & set(path.parts[:-1])}
    chosen = _one_set_of_weights([path for path in kept if path.parent not in engines])
    return sorted(
        str(path) for path in kept if path.parent in engines or (path in chosen and path.suffix not in _MEDIA)
    )


def served_files(names: Iterable[str]) -> list[str]:
    """The files of `needed`. Raises DownloadError, before gigabytes are downloaded, for an engine in other folders."""
    names = list(names)
    if nested := nested_engines(names):
        raise DownloadError(
            f"its compiled engine is in folders: {bounded(nested)}; expected config.json, rank0.engine, ... at the "
            "top; move them there, or download the repository and name the engine's folder"
        )
    return needed(names)


def tokenizer_files(names: Iterable[str]) -> list[str]:
    """The files to download for the tokenizer alone: those of `needed` without weights."""
    suffixes = (_SAFETENSORS, *_PICKLED, ".engine")
    weights = (*suffixes, *(f"{suffix}.index.json" for suffix in suffixes))
    return [name for name in needed(names) if not name.endswith(weights)]


def config_files(names: Iterable[str]) -> list[str]:
    """The files that say what a model is and how it is served: small, and without weights or tokenizer."""
    return [name for name in needed(names) if PurePosixPath(name).name in _CONFIGURATION or name.endswith(_INDEX)]


def nested_engines(names: Iterable[str]) -> list[str]:
    """The files of compiled engines in folders where `model.layout` does not look for one; sorted.

    Empty if there is also a model where it looks.
    """
    paths = sorted(map(PurePosixPath, names))
    engines = {path.parent for path in paths if _is_engine(path)}
    checkpoint = any(len(path.parts) == 1 and path.suffix in (_SAFETENSORS, *_PICKLED) for path in paths)
    if checkpoint or not _ENGINE_FOLDERS.isdisjoint(engines):
        return []
    return [str(path) for path in paths if path.parent in engines]


def _is_engine(path: PurePosixPath) -> bool:
    return path.suffix == ".engine" or path.name == "openvino_model.xml"


def _one_set_of_weights(paths: list[PurePosixPath]) -> set[PurePosixPath]:
    paths = [
        path
        for path in paths
        if path.suffix not in _FOREIGN and path.name not in _NO_WEIGHTS and not _COPIES & set(path.parts[:-1])
    ]
    top = [path for path in paths if len(path.parts) == 1]
    safetensors = [path for path in top if path.suffix == _SAFETENSORS]
    dropped: set[PurePosixPath] = set()
    if safetensors:
        dropped |= {path for path in paths if path.suffix in _PICKLED or path.name.endswith(".bin.index.json")}
    if any(not path.name.startswith("consolidated") for path in safetensors):
        dropped |= {path for path in top if path.name.startswith("consolidated")}
    return set(paths) - dropped


# -- the files in the cache --------------------------------------------------------------------------------------------

_RECORD = ".djl-trtllm-checked.json"
_CHUNK = 4 << 20
_READERS = 16
_LOOK_EVERY_SECONDS = 1.0

Record = dict[str, tuple[int, str]]
"""The files that were compared already: their path in the folder, time of last change, and checksum."""


class HubFile(NamedTuple):
    """A file in the hub's listing. `algorithm` is "SHA-256" (LFS), "git SHA-1", or empty if there is no checksum."""

    size: int
    algorithm: str
    checksum: str

    @classmethod
    def listed(cls, size: int | None, sha256: str | None, blob_id: str | None) -> "HubFile":
        """A file by the fields of a listing: `blob_id` is git's id of the content; for an LFS file, of its pointer."""
        if sha256:
            return cls(size or 0, "SHA-256", sha256)
        return cls(size or 0, "git SHA-1" if blob_id else "", blob_id or "")


class RepositoryFolder:
    """The folder of one repository in the hub's cache: `snapshots/COMMIT/...` are links to `blobs/CHECKSUM`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def missing_bytes(self, commit: str, files: Mapping[str, HubFile]) -> int:
        missing = 0
        for name, file in files.items():
            blob = self.path / "blobs" / file.checksum
            if not (self.path / "snapshots" / commit / name).exists() and not (file.checksum and blob.is_file()):
                missing += max(0, file.size - _allocated(blob.with_name(f"{blob.name}.incomplete")))
        return missing

    @contextmanager
    def watched(self, meter: ProgressMeter) -> Iterator[None]:
        """Count in `meter` what arrives in the folder while the block runs."""
        done = threading.Event()

        def present() -> int:
            return sum(map(_allocated, (self.path / "blobs").glob("*")))

        def watch(seen: int) -> None:
            last = False
            while not last:
                last = done.wait(_LOOK_EVERY_SECONDS)
                now = present()
                meter.add(now - seen)
                seen = now

        watching = threading.Thread(target=watch, args=(present(),), name="hub-progress", daemon=True)
        watching.start()
        try:
            yield
        finally:
            done.set()
            watching.join()

    def check(self, where: str, snapshot: Path, files: Mapping[str, HubFile], progress: Callable[[str], None]) -> None:
        """Compare new files with the hub's checksums, and remove those that differ.

        Raises DownloadError with the files that differed.
        """
        if not os.access(self.path, os.W_OK):
            return  # nothing can have been downloaded into it, and results could not be recorded
        known = self._recorded()
        unchecked = [name for name, file in files.items() if not file.algorithm]
        if unchecked:
            progress(f"{where}: the hub has no checksum to compare for {', '.join(unchecked[:5])}")
        fresh = {}
        for name, file in files.items():
            state = self._state(snapshot / name, file)
            if file.algorithm and (state is None or known.get(state[0]) != state[1]):
                fresh[name] = state
        if not fresh:
            return
        size = sum(files[name].size for name in fresh)
        with (
            ProgressMeter(f"comparing {where} with the hub's checksums", size, progress) as meter,
            ThreadPoolExecutor(_READERS) as readers,
        ):
            right = list(readers.map(lambda name: _is_right(snapshot / name, files[name], meter), fresh))
        self._record(dict(state for state, good in zip(fresh.values(), right, strict=True) if good and state))
        wrong = [name for name, good in zip(fresh, right, strict=True) if not good]
        if wrong:
            raise DownloadError(self._removed(snapshot, files, wrong))

    def _removed(self, snapshot: Path, files: Mapping[str, HubFile], wrong: list[str]) -> str:
        """Remove the files and return a description of them."""
        said = []
        for name in wrong:
            path, file = snapshot / name, files[name]
            size = path.stat().st_size if path.exists() else 0
            cut = file.size and size != file.size
            other = f"{size:,} bytes instead of {file.size:,}" if cut else f"a different {file.algorithm}"
            said.append(f"{name} arrived with {other} (the hub's {file.algorithm}: {file.checksum})")
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        what = "it was" if len(wrong) == 1 else "they were"
        return (
            f"{'; '.join(said)}; {what} removed, and the next start downloads again. If that does not help, something "
            "between this machine and the hub changes files: a proxy, or the mirror in HF_ENDPOINT"
        )

    def _state(self, path: Path, file: HubFile) -> tuple[str, tuple[int, str]] | None:
        """The key and the entry of a file in the record; None where the file is not there."""
        try:
            real = path.resolve(strict=True)
            return os.path.relpath(real, self.path.resolve()), (real.stat().st_mtime_ns, file.checksum)
        except OSError:
            return None

    def _recorded(self) -> Record:
        try:
            return msgspec.json.decode((self.path / _RECORD).read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return {}

    def _record(self, checked: Record) -> None:
        """Save the record. If another process writes it too, the lost entries are compared once more."""
        known = {key: value for key, value in self._recorded().items() if (self.path / key).is_file()}
        with suppress(OSError):
            write_whole(self.path / _RECORD, msgspec.json.encode(known | checked))


def _is_right(path: Path, file: HubFile, meter: ProgressMeter) -> bool:
    digest = hashlib.sha256() if file.algorithm == "SHA-256" else hashlib.sha1(usedforsecurity=False)
    try:
        with path.open("rb", buffering=0) as content:
            size = os.fstat(content.fileno()).st_size
            if file.size and size != file.size:
                return False
            if file.algorithm != "SHA-256":
                digest.update(b"blob %d\0" % size)
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
                meter.add(len(chunk))
    except FileNotFoundError:
        return False  # another process found it wrong and removed it
    return digest.hexdigest() == file.checksum


def _allocated(path: Path) -> int:
    """Downloaded bytes of a file, by the disk's blocks: it may have holes. 0 if there is none."""
    try:
        state = path.stat()
    except OSError:
        return 0
    return min(state.st_size, state.st_blocks * 512)


# As in the hub's library: the parts of a name begin and end with a letter, a digit or _. Other texts are paths.
_ID = re.compile(r"(?:\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b")
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_TOKEN_OPTION = "option.hf_access_token"  # noqa: S105  # its name, not a token
_TOKEN = re.compile(r"[!-~]+")
HUB_SCHEME = "hf://"
"""The prefix of a model's name on the hub, where the name could also be a local path."""
_HUB = "hf:"
"""The beginning of a text that is meant for the hub; `hub_id` says what is wrong with `hf:/owner/name`."""
_LOGS_OF_REQUESTS = ("httpx2", "httpcore2", "httpx", "httpcore", "urllib3")
"""Loggers of the HTTP clients: huggingface_hub 2 uses httpx2, 1 uses httpx, and 0 uses requests (urllib3)."""
_NOT_REACHED = {"TransportError", "ConnectionError", "Timeout"}
"""Names of the HTTP clients' exceptions when no response came."""
_ADVICE: dict[str, str] = read_table("advice.toml", __package__)["hub"]


def hub_id(text: str) -> str:
    """The repository that `owner/name` or `hf://owner/name` names. Raises DownloadError for other texts."""
    repository = text.removeprefix(HUB_SCHEME).rstrip("/")
    if not is_hub_id(repository):
        raise DownloadError(f"{text!r} is not the name of a model on the hub: expected owner/name")
    return repository


def is_hub_id(text: str) -> bool:
    """Return whether the text can be the name of a hub repository (`owner/name`, or a bare `name`).

    The name of an archive or a configuration counts as that of a file, although the hub would take it.
    """
    endings = (".git", *ARCHIVE_SUFFIXES, *CONFIGURATION_SUFFIXES)
    return bool(_ID.fullmatch(text)) and "--" not in text and ".." not in text and not text.endswith(endings)


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
        if lack := shortage(cache, missing):
            raise DownloadError(f"{lack}: free some space, or set HF_HOME to a larger disk")
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
    """The configuration's token; None if the environment has one, which the hub's library reads itself."""
    return None if any(os.environ.get(name, "").strip() for name in _TOKEN_VARIABLES) else token


def check_token(token: str | None) -> None:
    """Raise DownloadError for a token that no HTTP header can have; the message does not show it."""
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


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def explain(error: Exception, token: str | None = None) -> str:
    """Return what happened and what to do. `token` is the configuration's, if it was used."""
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


def is_remote(text: str) -> bool:
    """Return whether the text names something to download: an S3 address, or a hub id that is not a local path."""
    return is_s3(text) or text.startswith(_HUB) or (is_hub_id(text) and not Path(text).exists())


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
    patience: float = PATIENCE_SECONDS,
) -> Path:
    """The local directory (or archive) of a model in S3 or on the hub; see `is_remote`.

    `downloads` is the folder for downloads from S3; `hub_cache` replaces the hub's own cache, and `hub_token`
    is its token where the environment has none. With `tokenizer_only` the
    weights are not downloaded, with `config_only` only the files that describe the model (an archive whole). S3 is
    asked again for `patience` seconds if it refuses because it is asked too often. Raises DownloadError.
    """
    select = config_files if config_only else tokenizer_files if tokenizer_only else served_files
    if is_s3(text):
        # Importing botocore takes a third of a second; models on the hub do not need it.
        from djl_trtllm.model.remote.s3_download import download

        address = S3Address.parse(text)
        # One folder per selection, because a download removes earlier versions of its address.
        folder = downloads / ("s3-config" if config_only else "s3-tokenizers" if tokenizer_only else "s3")
        found = download(address, folder, progress, select=select, patience=patience)
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
        return msgspec.convert(found.tensors, dict[str, StoredTensor], from_attributes=True)

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
    elif text.startswith(_HUB):
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

        def send(path: Path, key: str) -> None:
            before = meter.done
            try:
                transfer.upload_file(str(path), address.bucket, key, callback=meter.add)
            except S3UploadFailedError as error:
                # boto3 raises this one while it handles the store's response, which says more.
                cause = error.__context__ or DownloadError(f"{address}: {error}")
                if not _was_completed(cause, address.bucket, key, path):
                    meter.add(before - meter.done)  # another attempt begins anew
                    raise cause from None

        for path, key in files.items():
            s3.patiently(partial(send, path, key), time.monotonic() + PATIENCE_SECONDS)


def _was_completed(error: BaseException, bucket: str, key: str, path: Path) -> bool:
    """Whether an upload in parts is unknown to the store because it is complete: the answer that said so was lost."""
    from botocore.exceptions import ClientError

    from djl_trtllm.model.remote import s3

    if not isinstance(error, ClientError) or error.response["Error"]["Code"] != "NoSuchUpload":
        return False
    try:
        return int(s3.client().head_object(Bucket=bucket, Key=key)["ContentLength"]) == path.stat().st_size
    except ClientError:
        return False


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
