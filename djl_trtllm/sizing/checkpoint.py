"""The sizes of a checkpoint: its tensors, and what its layers keep of a sequence. Reads headers, never weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.archive import ARCHIVE_SUFFIXES, is_archive
from djl_trtllm.model.checkpoint import (
    ModelShape,
    check_counts,
    find_weights,
    read_header,
    read_object,
    stored_kv_quantization,
    stored_quantization,
    text_part,
)
from djl_trtllm.model.remote.fetch import fetch, is_remote, remote_headers
from djl_trtllm.sizing.architecture import (
    LayerCache,
    expected_tensors,
    experts_per_token,
    is_tied,
    layer_caches,
    num_experts,
)
from djl_trtllm.sizing.tensors import Part, WeightTensor, parts_of, tensors_of


@dataclass(frozen=True)
class CheckpointSizes:
    """A model's tensors and caches, as the estimate needs them.

    `exact`: whether the tensors were read from the headers of weight files, not counted from config.json.
    """

    shape: ModelShape
    layers: tuple[LayerCache, ...]
    parts: tuple[Part, ...]
    """The tensors, summed by what decides their division among ranks."""
    source: str
    quantization: str | None = None
    """As stored, by TensorRT-LLM's name; None if the weights are not quantised."""
    kv_quantization: str | None = None
    """Quantisation of the KV cache, if the checkpoint asks for one."""
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    exact: bool = False

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def parameters(self) -> int:
        return sum(part.elements for part in self.parts)

    @classmethod
    def read(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        downloads: Path | None = None,
        hub_cache: Path | None = None,
        hub_token: str | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> CheckpointSizes:
        """Read a local directory, a hub id or an S3 address.

        Of remote models only config.json, the files beside it and the headers of weight files are downloaded.
        `downloads` is the folder for what comes from S3 (the temporary directory by default). Raises LayoutError for
        what is no checkpoint, DownloadError for what cannot be read.
        """
        text = str(source)
        if text.lower().endswith(ARCHIVE_SUFFIXES) or is_archive(Path(text)):
            raise LayoutError(
                f"{text} is an archive, which has to be read whole; name the directory that it extracts to"
            )
        if not is_remote(text):
            return cls._read(Path(source), text, None)
        with tempfile.TemporaryDirectory(prefix="djl-trtllm-size-") as scratch:
            path = fetch(
                text,
                downloads or Path(scratch),
                progress,
                revision=revision,
                hub_cache=hub_cache,
                hub_token=hub_token,
                config_only=True,
            )
            return cls._read(path, text, remote_headers(text, path, revision=revision, hub_token=hub_token))

    @classmethod
    def _read(cls, path: Path, source: str, headers: Mapping[str, Mapping[str, Any]] | None) -> CheckpointSizes:
        config = read_object(path / "config.json", LayoutError)
        if config is None:
            raise LayoutError(f"{source} has no config.json, which gives the sizes of a model; expected a checkpoint")
        if "builder_config" in config or "build_config" in config:
            raise LayoutError(f"{source} is a compiled engine: its sizes are fixed; expected the checkpoint it is of")
        if headers is None:
            files = find_weights(path)
            headers = {file.name: read_header(file) for file in files if file.suffix == ".safetensors"}
        tensors = tuple(tensor for name, header in headers.items() for tensor in tensors_of(header, name))
        return cls._of(config, source, tensors, path)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config.json") -> CheckpointSizes:
        """Count the parameters that `config` leads to expect."""
        return cls._of(config, source, (), None)

    @classmethod
    def _of(
        cls, config: Mapping[str, Any], source: str, tensors: tuple[WeightTensor, ...], directory: Path | None
    ) -> CheckpointSizes:
        text = text_part(config)
        check_counts(config, source, LayoutError)
        found = tensors or expected_tensors(config)
        shape = ModelShape.from_config(config, parameter_bytes=sum(tensor.bytes for tensor in found))
        return cls(
            shape=shape,
            layers=layer_caches(config),
            parts=parts_of(found, shape.num_layers),
            source=source,
            quantization=stored_quantization(directory, config),
            kv_quantization=stored_kv_quantization(directory, config),
            tied=is_tied(config),
            experts=num_experts(text),
            experts_per_token=experts_per_token(text),
            exact=bool(tensors),
        )
