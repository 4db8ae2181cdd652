"""The sizes of a checkpoint: its tensors, and what its layers keep of a sequence. Reads headers, never weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.json_file import read_object
from djl_trtllm.model.quantization import stored_quantization
from djl_trtllm.model.shape import ModelShape, text_part
from djl_trtllm.model.weights import find_weights, read_header
from djl_trtllm.sizing.layer_caches import LayerCache, layer_caches
from djl_trtllm.sizing.parameters import expected_tensors, is_tied, num_experts
from djl_trtllm.sizing.tensors import Tensor, tensors_of


@dataclass(frozen=True)
class CheckpointSizes:
    """What the estimate needs to know of a model.

    `exact`: whether the tensors were read from the headers of weight files, not counted from config.json.
    """

    shape: ModelShape
    layers: tuple[LayerCache, ...]
    tensors: tuple[Tensor, ...]
    source: str
    quantization: str | None = None
    """As stored, by TensorRT-LLM's name; None if the weights are not quantised."""
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    exact: bool = False

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @classmethod
    def read(cls, source: str | Path) -> CheckpointSizes:
        """Read a local directory. Raises LayoutError if it is no checkpoint."""
        path = Path(source)
        config = read_object(path / "config.json", LayoutError)
        if config is None:
            raise LayoutError(f"{path} has no config.json, which gives the sizes of a model; expected a checkpoint")
        files = find_weights(path)
        safe = bool(files) and all(file.suffix == ".safetensors" for file in files)
        tensors = tuple(tensor for file in files if safe for tensor in tensors_of(read_header(file), file))
        return cls._of(config, str(source), tensors, stored_quantization(path, config))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config.json") -> CheckpointSizes:
        """Count the parameters that `config` leads to expect."""
        return cls._of(config, source, (), None)

    @classmethod
    def _of(
        cls, config: Mapping[str, Any], source: str, tensors: tuple[Tensor, ...], quantization: str | None
    ) -> CheckpointSizes:
        text = text_part(config)
        found = tensors or expected_tensors(config)
        return cls(
            shape=ModelShape.from_config(config, parameter_bytes=sum(tensor.bytes for tensor in found)),
            layers=layer_caches(config),
            tensors=found,
            source=source,
            quantization=quantization,
            tied=is_tied(config),
            experts=num_experts(text),
            experts_per_token=int(text.get("num_experts_per_tok") or 0),
            exact=bool(tensors),
        )
