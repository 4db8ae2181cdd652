"""What goes to the worker."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from . import names

_CHECKPOINT_SOURCE = "lora_ckpt_source" in names.arguments("LoRARequest")


@dataclass(slots=True)
class _LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if self.lora_path is not None and not os.path.exists(self.lora_path):
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")

    def explicit_fields(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self))

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(slots=True)
class _LoRARequestWithSource(_LoRARequest):
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        _LoRARequest.__post_init__(self)
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(f"lora_ckpt_source must be one of ['hf', 'nemo'], got '{self.lora_ckpt_source}'")

    def explicit_fields(self) -> tuple[str, ...]:
        explicit = _LoRARequest.explicit_fields(self)
        return tuple(name for name in explicit if name != "lora_ckpt_source" or self.lora_ckpt_source != "hf")


LoRARequest = _LoRARequestWithSource if _CHECKPOINT_SOURCE else _LoRARequest
LoRARequest.__name__ = LoRARequest.__qualname__ = "LoRARequest"


class GenerationRequest:
    id: int
    """Of the executor, when it registers the request."""
    max_new_tokens: int
    """Of the engine, when it takes the request."""
    drawn: int = 0
    """What chance adds to the place where it begins."""

    def __init__(self, prompt_token_ids: list[int], sampling_params: Any, lora_request: Any, streaming: bool) -> None:
        if not isinstance(prompt_token_ids, list):
            raise TypeError(
                f"prompt_token_ids ({prompt_token_ids}) should be an instance of torch.Tensor, np.ndarray or list"
            )
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.lora_request = lora_request
        self.streaming = streaming


class CancellingRequest:
    def __init__(self, id: int) -> None:
        self.id = id
