"""Extract `model.tar.gz` to a model directory without trusting its content, and pack one.

Paths, file types, owners and modes from the archive are not applied: only regular files and directories below the
destination are written, with plain permissions, and all limits are checked while writing.
"""

import bz2
import gzip
import io
import logging
import lzma
import os
import secrets
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

import filelock

from djl_trtllm.errors import ArchiveError, LayoutError, ModelError
from djl_trtllm.files import file_sha256
from djl_trtllm.model.work_directory import shortage, staged, sweep
from djl_trtllm.progress import ProgressMeter, format_bytes

logger = logging.getLogger(__name__)

_CHUNK = 4 * 1024 * 1024
_MAX_DEPTH = 32
_MAX_DESCENT = 16
"""The most archives and folders that are opened one inside the other, each the only content of the outer one."""
_MAX_RECORD = 1024 * 1024
_MOST_READS_AT_END = 16
_MOST_RECORDS = 16
"""The most records before a member. A plain archive has up to four: names, attributes, and those of the archive."""
_RECORDS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_LOCK_TIMEOUT = 3600.0
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


MOST_BYTES = 2 * 1024**4
"""The most bytes of a decompressed archive. The disk's free space is checked too."""
MOST_MEMBERS = 100_000
"""The most files and directories of an archive."""
MOST_RATIO, RATIO_FROM_BYTES = 1_000, 1024**3
"""An archive that decompresses to more than `RATIO_FROM_BYTES` may have `MOST_RATIO` times its own bytes."""


def is_archive(path: Path) -> bool:
    """Return whether `path` is a tar archive, plain or compressed. A damaged one is recognised by its name."""
    if not path.is_file():
        return False
    if path.name.lower().endswith(ARCHIVE_SUFFIXES):
        return True
    try:
        return tarfile.is_tarfile(path)
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return False


def extract(archive: Path, into: Path) -> None:
    """Extract `archive` to the new directory `into`.

    `into` appears complete or not at all. Raises OSError, and `ArchiveError` if the archive is damaged or too large, or
    has members that are not plain files and directories inside it.
    """
    with staged(into) as partial:
        _Extraction(archive, partial).run()
        partial.chmod(0o755)


def open_model(path: Path, workdir: Path) -> Path:
    """The model directory for `path`, a directory or an archive.

    A directory is returned unchanged, unless its only content is one directory or one archive (SageMaker's
    `/opt/ml/model`), which is then opened instead. An archive is extracted to a sub-directory of `workdir` named after
    its content, and found there when it is opened again, also by another process. Raises `ArchiveError`, and
    `LayoutError` if nothing is at `path`.
    """
    for _ in range(_MAX_DESCENT):
        if path.is_dir():
            below = _only_content(path)
            if below is None:
                return path
            path = below
        elif path.is_file():
            path = _open_archive(path, workdir)
        else:
            raise LayoutError(
                f"no model at {path}: expected a model directory, a .tar.gz of one, or a configuration file in one"
            )
    raise ArchiveError(f"{path}: more than {_MAX_DESCENT} archives and folders inside one another; pack the model once")


def _open_archive(archive: Path, workdir: Path) -> Path:
    if not is_archive(archive):
        raise ArchiveError(
            f"{archive} is not a tar archive ({archive.stat().st_size} bytes, starts with {_head(archive)!r}): "
            "expected a model directory, or a .tar.gz, .tgz or .tar of one, as `tar czvf model.tar.gz model/` makes"
        )
    try:
        into = workdir / f"model-{file_sha256(archive)[:32]}"
        workdir.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(workdir / f".{into.name}.lock", timeout=_LOCK_TIMEOUT):
            sweep(into)
            if not into.is_dir():
                logger.info("extracting %s to %s", archive, into)
                extract(archive, into)
    except filelock.Timeout as error:
        raise ArchiveError(
            f"cannot extract {archive}: another process has been extracting it to {into} for {_LOCK_TIMEOUT:.0f} s; "
            "end that process, or choose another place"
        ) from error
    except (OSError, NotImplementedError) as error:  # filelock's, of a file system without locks
        raise ArchiveError(
            f"cannot extract {archive} to {workdir}: {error}; set option.engine_cache_dir to a folder that can be "
            "written"
        ) from error
    return into


class _Extraction:
    def __init__(self, archive: Path, root: Path) -> None:
        self.archive = archive
        self.root = root
        self.packed_bytes = archive.stat().st_size
        self.unpacked_bytes = 0
        self.reads_at_end = 0
        self.members = 0
        self.current = "(its first member)"

    def run(self) -> None:
        self._check_disk(self.packed_bytes)
        try:
            with self.archive.open("rb") as file, _decompressed(file) as self._stream:
                # A stream: every member is read once, in order, so no header can point elsewhere in the file.
                header = type("_OwnHeader", (_Header,), {})
                with tarfile.open(fileobj=self, mode="r|", tarinfo=header) as tar:  # type: ignore[call-overload]
                    for member in tar:
                        self.current = member.name
                        self._write(tar, member)
                while self.read(_CHUNK):
                    pass  # a compressed file has its checksum after the last byte
        except tarfile.TarError as error:
            raise self._error(f"it is damaged or truncated ({error})", "make or download it again") from error
        except OSError as error:
            raise self._error(f"it cannot be written ({error})", "check the disk and its permissions") from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise self._error(f"its header is damaged ({error})", "make or download it again") from error
        if not any(self.root.iterdir()):
            raise self._error("there are no files in it", "pack the model directory: tar czvf model.tar.gz model/")

    def read(self, size: int) -> bytes:
        """Read the decompressed archive for `tarfile` and check the size limits."""
        try:
            chunk = self._stream.read(size)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise self._error(f"the archive is damaged or truncated ({error})", "make or download it again") from error
        # `tarfile` skips a member of a terabyte that is not there in a hundred million reads.
        self.reads_at_end = 0 if chunk else self.reads_at_end + 1
        if self.reads_at_end > _MOST_READS_AT_END:
            raise self._error(
                "the archive is truncated (it has less than its headers say)", "make or download it again"
            )
        self.unpacked_bytes += len(chunk)
        if self.unpacked_bytes > MOST_BYTES:
            raise self._error(f"the archive extracts to more than {format_bytes(MOST_BYTES)}", "pack less")
        if self.unpacked_bytes > max(RATIO_FROM_BYTES, self.packed_bytes * MOST_RATIO):
            grown = f"{format_bytes(self.unpacked_bytes)} from {format_bytes(self.packed_bytes)}"
            raise self._error(f"the archive extracts to {grown}, a ratio that no model reaches", "check its content")
        return chunk

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.members += 1
        if self.members > MOST_MEMBERS:
            raise self._error(f"the archive has more than {MOST_MEMBERS:,} members", "pack only the model's files")
        parts = self._parts(member)
        if parts is None:
            return
        target = self.root.joinpath(*parts)
        if member.isdir():
            self._make_directory(target)
            return
        if not member.isreg():
            raise self._error(f"it is {_kind(member)}", "pack plain files only (tar's option -h follows links)")
        if member.issparse():
            # A file of any size in a few bytes.
            raise self._error("it is a sparse file", "pack it whole (without tar's option -S)")
        if target.exists():
            raise self._error("an earlier member has the same path", "make the archive again")
        self._make_directory(target.parent)
        self._check_disk(member.size)
        source = tar.extractfile(member)
        assert source is not None  # it is a regular file
        with source, target.open("xb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
        target.chmod(0o755 if member.mode & 0o100 else 0o644)

    def _parts(self, member: tarfile.TarInfo) -> tuple[str, ...] | None:
        """The safe path of a member below the destination; None if the member is to be skipped."""
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or "\0" in member.name:
            raise self._error("its path leads out of the archive", "pack with relative paths, without '..'")
        if len(path.parts) > _MAX_DEPTH or any(len(os.fsencode(part)) > 255 for part in path.parts):
            raise self._error("its path is too long", "pack the model's files at the top of the archive")
        if not path.parts or any(_is_junk(part) for part in path.parts):
            return None
        return path.parts

    def _make_directory(self, target: Path) -> None:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise self._error("a file and a directory have the same name", "make the archive again") from error

    def _check_disk(self, needed: int) -> None:
        if lack := shortage(self.root.parent, needed):
            raise ArchiveError(f"cannot extract {self.archive}: {lack}; free some space, or choose another place")

    def _error(self, wrong: str, do: str) -> ArchiveError:
        return ArchiveError(f"cannot extract {self.archive}: at member {self.current[:200]!r}: {wrong}; {do}")


class _Header(tarfile.TarInfo):
    """A member's header that reports damage.

    `tarfile` treats a damaged header as the end of the archive, and reads name and attribute records of any size into
    memory. It reads a chain of them by recursion.
    """

    records = 0
    """The records since the last member. Each archive makes a subclass, so that only its own records are counted."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        try:
            header = super().frombuf(buf, encoding, errors)
        # Typeshed has neither.
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"the header after it cannot be read: {error}") from error
        if header.type in _RECORDS and header.size > _MAX_RECORD:
            raise tarfile.ReadError(f"the name or attribute record after it has {format_bytes(header.size)}")
        cls.records = cls.records + 1 if header.type in _RECORDS else 0
        if cls.records > _MOST_RECORDS:
            raise tarfile.ReadError(f"more than {_MOST_RECORDS} name or attribute records follow each other")
        return header


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    head = file.read(6)
    file.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if head.startswith(b"BZh"):
        return cast(IO[bytes], bz2.BZ2File(file))
    if head.startswith(b"\xfd7zXZ"):
        return cast(IO[bytes], lzma.LZMAFile(file))
    return file


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return f"a {'symbolic' if member.issym() else 'hard'} link to {member.linkname[:200]!r}"
    if member.isfifo():
        return "a named pipe"
    return "a device" if member.isdev() else f"of an unknown type ({member.type!r})"


def _is_junk(part: str) -> bool:
    """Whether archivers leave a file of this name behind: macOS's resource forks, pax headers as files."""
    return part.startswith("._") or part in ("__MACOSX", ".DS_Store") or part.startswith("PaxHeader")


def _only_content(directory: Path) -> Path | None:
    """The only directory or archive in a directory, if there is nothing else.

    Folders whose name has a meaning are not followed: `tensorrt_llm/` of a model repository and `1/` in it.
    """
    try:
        entries = [entry for entry in directory.iterdir() if not _is_junk(entry.name) and entry.name != "lost+found"]
    except OSError as error:
        raise LayoutError(f"cannot read the model directory {directory}: {error}") from error
    if len(entries) != 1:
        return None
    only = entries[0]
    if only.is_dir():
        return None if (only / "config.pbtxt").is_file() or only.name.isdigit() else only
    return only if is_archive(only) else None


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(16)


# -- packing -----------------------------------------------------------------------------------------------------------

_SKIPPED = frozenset({"__pycache__", "__MACOSX", "lost+found"})
_COMPRESSION = 1
"""A low gzip level: weights do not compress, and the other files are small."""


def parameters_file(archive: Path) -> Path:
    """The file beside an archive with its parameters for SageMaker's template; it is not packed."""
    return archive.with_name(f"{archive.name.removesuffix('.tar.gz')}.parameters.json")


def package(directory: Path, out: Path, progress: Callable[[str], None] = lambda line: None) -> list[str]:
    """Pack a directory's files at the top of the archive `out`, and return their names.

    Hidden files and caches are left out. Links are followed, but not out of the directory. Times, owners and the order
    of files do not affect the bytes. `out` appears complete or not at all. Raises ModelError.
    """
    files = dict(sorted(_files(directory, out)))
    if not files:
        raise ModelError(f"{directory} has no files to pack")
    size = sum(path.stat().st_size for path in files.values())
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        with (
            partial.open("wb") as raw,
            gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
            ProgressMeter(f"packing {out}", size, progress) as meter,
        ):
            for name, path in files.items():
                with path.open("rb") as content:
                    archive.addfile(_header(name, path), _Counted(content, meter))
        partial.replace(out)
    except OSError as error:
        raise ModelError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return list(files)


class _Counted(io.RawIOBase):
    """A file that counts its bytes as they are read."""

    def __init__(self, file: BinaryIO, meter: ProgressMeter) -> None:
        self._file = file
        self._meter = meter

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._meter.add(len(data))
        return data


def _files(directory: Path, out: Path) -> Iterator[tuple[str, Path]]:
    root = directory.resolve()
    ours = (out.resolve(), parameters_file(out).resolve())
    for folder, folders, names in os.walk(directory, followlinks=True):
        folders[:] = sorted(name for name in folders if not _is_skipped(name))
        for name in names:
            path = Path(folder, name)
            if _is_skipped(name) or path.resolve() in ours:
                continue
            if not path.resolve().is_relative_to(root):
                raise ModelError(f"{path} is a link out of {directory}: replace it by what it points to")
            yield path.relative_to(directory).as_posix(), path


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED


def _header(name: str, path: Path) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    status = path.stat()
    header.size = status.st_size
    header.mode = 0o755 if status.st_mode & 0o100 else 0o644
    return header
