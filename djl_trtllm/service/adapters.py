"""The LoRA adapters of a model: those in its `adapters` folder, and those registered while it is being served."""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError, ModelError, UnknownAdapterError
from djl_trtllm.model.adapter import CONFIG_FILE, AdapterLimits, check_adapter, description_bytes
from djl_trtllm.request import Adapter
from djl_trtllm.service.work import BoundedCalls

_LONGEST = 4096
_SHOWN_CHARACTERS = 80


def problem_of_name(name: str, what: str) -> str | None:
    """Why a client cannot give this name to `what`; None if it can."""
    if not name:
        return f"{what} needs a name"
    if "/" in name or name in (".", ".."):
        return f"the name of {what} is {name[:_SHOWN_CHARACTERS]!r}: expected one without '/'"
    return problem_of_text(name, f"the name of {what}")


def problem_of_text(text: str, what: str) -> str | None:
    """Why this text cannot be a name or a path; None if it can."""
    if len(text) > _LONGEST:
        return f"{what} has {len(text)} characters: expected at most {_LONGEST}"
    if not text.isprintable():
        return f"{what} is {text[:_SHOWN_CHARACTERS]!r}: expected one without line ends and control characters"
    return None


logger = logging.getLogger(__name__)

FOLDER = "adapters"
_SHOWN = 10
_LARGE = 1 << 20
"""Bytes of an adapter from which a process apart reads it, which takes 0.75 s to start; reading them takes some 80 ms.

An adapter of all modules of 126 layers has 0.3 MB to read.
"""
_SAGEMAKER = Path("/opt/ml")
"""The folder in which SageMaker mounts what it fetches, the adapters of inference components too."""


class Adapters:
    """Adapters by name. `folder` is the model's own; clients can register adapters in it and in `roots`, nowhere else.

    With `limits`, adapters that the engine could not load are refused; those in `folder` are left out, with a warning.
    Ids are never reused, because the engine keeps adapters by id and a name that is registered again may have other
    weights.
    """

    def __init__(self, folder: Path, roots: Iterable[Path] = (), limits: AdapterLimits | None = None) -> None:
        self._folder = folder
        self._roots = tuple(roots)
        self._limits = limits
        self._adapters: dict[str, Adapter] = {}
        self._left_out: dict[str, str] = {}
        self._next_id = 1
        self._adding = threading.Lock()
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                if (path / CONFIG_FILE).is_file():
                    self._add_found(path)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._adapters.values()))  # others may be registered meanwhile, in other threads

    def find(self, name: str) -> Adapter:
        """The adapter of this name. Raises UnknownAdapterError, which lists the registered ones."""
        if name in self._adapters:
            return self._adapters[name]
        if name in self._left_out:
            raise UnknownAdapterError(f"the adapter {name!r} was not registered: {self._left_out[name]}")
        known = ", ".join(list(self._adapters)[:_SHOWN])
        raise UnknownAdapterError(
            f"there is no adapter {name!r}: registered are {known or 'none'}"
            + (", …" if len(self._adapters) > _SHOWN else "")
        )

    def register(self, name: str, source: str) -> Adapter:
        """Register the adapter in the directory `source`: below the model's `adapters` folder, or in another root.

        Reads files, and may be called in any thread. Raises InvalidRequestError if the name is taken, or the directory
        is outside of them or has no adapter.
        """
        problem = problem_of_name(name, "an adapter") or problem_of_text(source, "the adapter's src")
        if problem is not None:
            raise InvalidRequestError(problem)
        self._require_free(name)
        folder = self._folder.resolve()
        path = (folder / source).resolve()
        own = path.is_relative_to(folder) and path != folder
        if not own and not any(path.is_relative_to(root) and path != root for root in map(Path.resolve, self._roots)):
            others = "".join(f", {root}" for root in self._roots)
            raise InvalidRequestError(
                f"the adapter's src is {source!r}, and adapters are registered from the model's own folder{others} "
                f"only: put it below {FOLDER}/ in the model directory, and pass its path there, or name its folder in "
                "SERVING_ADAPTER_ROOTS"
            )
        try:
            there = (path / CONFIG_FILE).is_file()
        except OSError:  # a part of it is too long for a name
            there = False
        if not there:
            shown = f"{FOLDER}/{path.relative_to(folder)}" if own else path
            raise InvalidRequestError(f"{shown} holds no adapter: {CONFIG_FILE} is missing")
        try:
            self._check(path)
        except ModelError as error:
            raise InvalidRequestError(f"the adapter {name!r} cannot be used: {error}") from error
        with self._adding:
            self._require_free(name)
            return self._add(name, path)

    def unregister(self, name: str) -> None:
        """Unregister an adapter; requests that use it continue. Raises UnknownAdapterError."""
        del self._adapters[self.find(name).name]

    def _require_free(self, name: str) -> None:
        if name in self._adapters:
            raise InvalidRequestError(f"there is an adapter {name!r} already: unregister it first")

    def _add_found(self, path: Path) -> None:
        try:
            self._check(path)
        except ModelError as error:
            logger.warning("the adapter %s is left out: %s", path.name, error)
            self._left_out[path.name] = str(error)
        else:
            self._add(path.name, path)

    def _check(self, path: Path) -> None:
        if self._limits is None:
            return
        if description_bytes(path) <= _LARGE:
            return check_adapter(path, self._limits)
        with BoundedCalls(f"reading the files of {path}") as calls:
            calls(check_adapter, path, self._limits)

    def _add(self, name: str, path: Path) -> Adapter:
        self._left_out.pop(name, None)
        adapter = self._adapters[name] = Adapter(name, self._next_id, str(path))
        self._next_id += 1
        return adapter


def adapter_roots(options: Options, environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """The folders that the operator names; without any, SageMaker's in a container of SageMaker."""
    if options.adapter_roots:
        return tuple(map(Path, options.adapter_roots))
    return (_SAGEMAKER,) if any(name.startswith("SAGEMAKER_") for name in environ) else ()
