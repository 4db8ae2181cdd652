"""The LoRA adapters of a model: those in its `adapters` folder, and those registered while it is being served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from djl_trtllm.errors import InvalidRequestError, UnknownAdapterError
from djl_trtllm.request import Adapter

FOLDER = "adapters"
CONFIG_FILE = "adapter_config.json"
_SHOWN = 10


class Adapters:
    """Adapters by name. `folder` is the model's own; clients can register adapters in it and nothing else.

    Ids are never reused, because the engine keeps adapters by id and a name that is registered again may have other
    weights.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._adapters: dict[str, Adapter] = {}
        self._next_id = 1
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                if (path / CONFIG_FILE).is_file():
                    self._add(path.name, path)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    def find(self, name: str) -> Adapter:
        """The adapter of this name. Raises UnknownAdapterError, which lists the registered ones."""
        if name in self._adapters:
            return self._adapters[name]
        known = ", ".join(list(self._adapters)[:_SHOWN])
        raise UnknownAdapterError(
            f"there is no adapter {name!r}: registered are {known or 'none'}"
            + (", …" if len(self._adapters) > _SHOWN else "")
        )

    def register(self, name: str, source: str) -> Adapter:
        """Register the adapter in the directory `source` below the model's `adapters` folder.

        Raises InvalidRequestError if the name is taken, or the directory is outside the folder or has no adapter.
        """
        if not name:
            raise InvalidRequestError("an adapter needs a name")
        if name in self._adapters:
            raise InvalidRequestError(f"there is an adapter {name!r} already: unregister it first")
        folder = self._folder.resolve()
        path = (folder / source).resolve()
        if not path.is_relative_to(folder) or path == folder:
            raise InvalidRequestError(
                f"the adapter's src is {source!r}, and adapters are registered from the model's own folder only: put "
                f"it below {FOLDER}/ in the model directory, and pass its path there"
            )
        if not (path / CONFIG_FILE).is_file():
            raise InvalidRequestError(f"{FOLDER}/{path.relative_to(folder)} holds no adapter: {CONFIG_FILE} is missing")
        return self._add(name, path)

    def unregister(self, name: str) -> None:
        """Unregister an adapter; requests that use it continue. Raises UnknownAdapterError."""
        del self._adapters[self.find(name).name]

    def _add(self, name: str, path: Path) -> Adapter:
        adapter = self._adapters[name] = Adapter(name, self._next_id, str(path))
        self._next_id += 1
        return adapter
