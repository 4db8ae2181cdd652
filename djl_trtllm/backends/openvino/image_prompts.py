"""Prompts with images: OpenVINO GenAI takes them as text, which it tokenises, and pixels, which its processor reads.

The ids of the server become the text that gives the same ids again. After a prompt the engine takes no tokens, so that
a sequence that goes on in another process begins anew there (`Limits.repeats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from djl_trtllm.errors import LayoutError
from djl_trtllm.executor.protocol import Refusal
from djl_trtllm.model.checkpoint import read_object
from djl_trtllm.model.vision import ScaledImages, Vision
from djl_trtllm.request import Image

_MARK = "<ov_genai_"
"""The beginning of OpenVINO GenAI's own marks of images and videos, which it replaces in any text."""


def refusal(error: Exception) -> str | Refusal:
    """The reason why a prompt could not be started.

    OpenVINO's processor refuses prompts that the server takes.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, MemoryError):
        return f"the engine's memory is not enough for the prompt: {lines[-1]}"
    return Refusal(f"the prompt is refused: {lines[-1]}")


class ImagePrompts:
    """The prompts of an engine that takes images. `tokenizer` is the pipeline's."""

    def __init__(self, engine_dir: Path, tokenizer: Any) -> None:
        vision = Vision.find(engine_dir, read_object(engine_dir / "config.json", LayoutError))
        if vision is None:
            raise ValueError(f"{engine_dir} does not say how its model takes images: compile it again")
        self._vision = vision
        self._scaled = ScaledImages(vision)
        self._tokenizer = tokenizer

    def arguments(self, ids: Sequence[int], images: Sequence[Image], salt: str) -> tuple[str, list[ov.Tensor]]:
        """The text and the images of a prompt, as `add_request` takes them. Raises ValueError."""
        given = self._vision.collapsed(ids, [image.tokens for image in images])
        text = self._tokenizer.decode(given, skip_special_tokens=False)
        if _MARK in text:
            raise ValueError(f"leave '{_MARK}' out of texts: OpenVINO GenAI's own marks of images begin with it")
        # `add_request` adds special tokens, too.
        if self._tokenizer.encode(text).input_ids.data[0].tolist() != given:
            raise ValueError("its tokens are not those of a text, and this engine takes texts only")
        # In the order rows, columns, colours.
        pixels = [np.array(self._scaled.pixels(image.data, salt)) for image in images]
        return text, [ov.Tensor(each[np.newaxis]) for each in pixels]
