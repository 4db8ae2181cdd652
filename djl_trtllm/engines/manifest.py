"""`manifest.json`: what an engine directory was compiled from, with what, and the checksums of its files."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from djl_trtllm.engines.file_hashes import file_sha256
from djl_trtllm.errors import EngineMismatchError

MANIFEST_FILE = "manifest.json"
FORMAT = 1

OptionValue = str | int | float | bool | list[Any] | None


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of an engine directory: bytes and hex SHA-256."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The record in an engine directory.

    `checkpoint` is the `checkpoint_identity()` of the compiled checkpoint, `options` are the options that affect the
    engine, `versions` the packages that made it. `platform` is the target: for OpenVINO the machine's architecture
    (`x86_64`), for TensorRT the GPU's (`sm_90`). `created` is UTC in ISO 8601, `files` every other file of the
    directory by its relative path. `limits` are the batch size and lengths that it was compiled for, by option, where
    the engine's own files do not have them.
    """

    format: int
    backend: str
    checkpoint: str
    options: dict[str, OptionValue]
    versions: dict[str, str]
    platform: str
    created: str
    files: dict[str, FileEntry]
    limits: dict[str, int] = {}

    @classmethod
    def of(
        cls,
        directory: Path,
        *,
        backend: str,
        checkpoint: str,
        options: Mapping[str, OptionValue],
        versions: Mapping[str, str],
        platform: str,
        limits: Mapping[str, int] | None = None,
    ) -> Manifest:
        """Describe a newly compiled directory; reads and hashes every file. Raises OSError."""
        files = {
            path.relative_to(directory).as_posix(): FileEntry(path.stat().st_size, file_sha256(path))
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path.name != MANIFEST_FILE
        }
        return cls(
            format=FORMAT,
            backend=backend,
            checkpoint=checkpoint,
            options=dict(options),
            versions=dict(versions),
            platform=platform,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files=files,
            limits=dict(limits or {}),
        )

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The directory's manifest, or None if it has none.

        Raises EngineMismatchError if it cannot be read.
        """
        path = directory / MANIFEST_FILE
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise EngineMismatchError(f"{path} cannot be read: {error}") from error
        remedy = "compile the engine again, or delete the manifest to serve the directory unchecked"
        try:
            manifest = msgspec.json.decode(content, type=cls)
        except msgspec.DecodeError as error:
            raise EngineMismatchError(f"{path} is broken ({error}): {remedy}") from error
        if manifest.format != FORMAT:
            raise EngineMismatchError(
                f"{path} has format {manifest.format}, this version of djl-trtllm reads format {FORMAT}: {remedy}"
            )
        return manifest

    def write(self, directory: Path) -> None:
        """Write `manifest.json`. Call it last: its presence says that the directory is complete."""
        path = directory / MANIFEST_FILE
        temporary = path.with_name(f".{MANIFEST_FILE}.partial")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        temporary.replace(path)

    def verify(self, directory: Path, *, contents: bool = True) -> list[str]:
        """List what is missing, truncated or changed, one line per file; empty if the directory is intact.

        With `contents=False` compares sizes only; otherwise reads every byte (see `FileHashes` for the cost).
        """
        problems = []
        for name, entry in self.files.items():
            path = directory / name
            try:
                size = path.stat().st_size
                if size < entry.size:
                    problems.append(f"{name}: truncated, {size} of {entry.size} bytes")
                elif size > entry.size:
                    problems.append(f"{name}: changed, {size} bytes where {entry.size} were written")
                elif contents and file_sha256(path) != entry.sha256:
                    problems.append(f"{name}: changed, same size and a different SHA-256")
            except (FileNotFoundError, NotADirectoryError):
                problems.append(f"{name}: missing")
            except OSError as error:
                problems.append(f"{name}: cannot be read ({error})")
        return problems

    def require_whole(self, directory: Path) -> None:
        raise_damaged(directory, self.verify(directory, contents=False))

    def require_fit(
        self, directory: Path, *, backend: str, options: Mapping[str, OptionValue], versions: Mapping[str, str]
    ) -> None:
        """Raise EngineMismatchError with everything that differs (see `differences`)."""
        if differences := self.differences(backend=backend, options=options, versions=versions):
            remedy = "change the option, or compile the checkpoint again with `djl-trtllm compile CHECKPOINT OUT`"
            raise _mismatch(f"the engine {directory} does not fit:", differences, remedy)

    def differences(
        self,
        *,
        backend: str | None = None,
        checkpoint: str | None = None,
        options: Mapping[str, OptionValue] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> list[str]:
        """List how this engine differs from the arguments, one line each; None is not compared.

        `options` are the requested ones by name. `versions` are the installed runtime's; only a runtime older than the
        one that made the engine is a difference, because newer ones read it.
        """
        lines = []
        if backend is not None and backend != self.backend:
            lines.append(f"option.backend: engine has {self.backend}, asked for {backend}")
        if checkpoint is not None and checkpoint != self.checkpoint:
            lines.append(f"checkpoint: engine was made from {self.checkpoint}, this one is {checkpoint}")
        for name, asked in (options or {}).items():
            if name in self.options and self.options[name] != asked:
                lines.append(f"option.{name}: engine has {_shown(self.options[name])}, asked for {_shown(asked)}")
        for package, installed in (versions or {}).items():
            made_with = self.versions.get(package)
            if made_with is not None and _release(installed) < _release(made_with):
                lines.append(f"{package}: engine was made with {made_with}, installed is the older {installed}")
        return lines


def raise_damaged(directory: Path, problems: list[str]) -> None:
    if problems:
        remedy = "copy it again, or compile it again with `djl-trtllm compile CHECKPOINT OUT`"
        raise _mismatch(f"the engine {directory} is damaged:", problems, remedy)


def _mismatch(head: str, problems: list[str], remedy: str) -> EngineMismatchError:
    return EngineMismatchError("\n".join([head, *(f"  - {problem}" for problem in problems), remedy]))


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _release(version: str) -> tuple[int, ...]:
    # Year and feature release: patch releases of OpenVINO read each other's IR.
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _shown(value: OptionValue) -> str:
    return "none" if value is None else str(value)


@dataclass(frozen=True)
class EngineDir:
    """A complete engine, ready to be loaded.

    `manifest` is None for a directory that another tool wrote; `tokenizer_dir` holds the tokenizer's files.
    """

    path: Path
    backend: str
    manifest: Manifest | None
    tokenizer_dir: Path
