"""What the LLM makes of prompts before the engine gets them: `inputs/registry.py`, and Qwen-VL's processor in
`_torch/models/modeling_qwen2vl.py`, of 49,604 characters (1.2) and of 97,587 (about 1.4)."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from packaging.version import Version

from . import settings
from .settings import VERSION, logger, script

QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_NAMED = "multi_modal_uuids" in settings.members("TextPrompt")
# The ids of images were one beyond the vocabulary (`tllm_multimodal_token_id`).
_BEYOND_VOCABULARY = Version("1.4.0rc0") > VERSION

if TYPE_CHECKING:

    class TextPrompt(TypedDict, total=False):
        prompt: str
        multi_modal_data: dict[str, Any]
        multi_modal_uuids: dict[str, list[Any]]
else:
    TextPrompt = TypedDict("TextPrompt", dict.fromkeys(settings.members("TextPrompt"), Any), total=False)


class Processed(NamedTuple):
    """`positions`: whether the tokens have their places for the rotary embedding; `hashes` are of images."""

    prompt_token_ids: list[int]
    positions: bool = False
    hashes: tuple[str, ...] = ()
    images: int = 0


class BaseMultimodalInputProcessor:
    """Without images a prompt is only tokenised."""

    def __init__(self, model: Path, config: dict[str, Any], tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.multimodal_hashing_supported: bool | None = None

    def __call__(self, inputs: Any) -> Processed:
        return Processed(self.tokenizer.encode(inputs["prompt"]))


class Qwen2VLInputProcessor(BaseMultimodalInputProcessor):
    """An image, scaled to whole squares, has an id for each square."""

    def __init__(self, model: Path, config: dict[str, Any], tokenizer: Any) -> None:
        super().__init__(model, config, tokenizer)
        self._processor = _image_processor(model)
        self._placeholder = config["image_token_id"]
        vocabulary = config.get("text_config", config)["vocab_size"]
        self._stands_for_images = vocabulary + 1 if _BEYOND_VOCABULARY else self._placeholder

    def __call__(self, inputs: Any) -> Processed:
        images = inputs.get("multi_modal_data", {}).get("image", [])
        if images and script()["processor_error"]:
            raise RuntimeError(script()["processor_error"])
        lengths, count = [self._tokens(*image.size) for image in images], itertools.count()
        ids: list[int] = []
        for token_id in self.tokenizer.encode(inputs["prompt"]):
            if token_id == self._placeholder:
                ids += [self._stands_for_images] * lengths[next(count)]  # an IndexError where there is no image
            else:
                ids.append(token_id)
        return Processed(ids, True, self._hashes(inputs, images), len(images))

    def _hashes(self, inputs: Any, images: list[Any]) -> tuple[str, ...]:
        """They are tried with the first images, and never again where that fails. Pixels count without their size."""
        if images and self.multimodal_hashing_supported is None:
            self.multimodal_hashing_supported = bool(script()["hashes_images"])
            if not self.multimodal_hashing_supported:
                logger.warning("Multimodal hashing failed: scripted.")
        if not self.multimodal_hashing_supported:
            return ()
        names = inputs.get("multi_modal_uuids", {}).get("image") if _NAMED else None
        given = names or [""] * len(images)
        return tuple(
            hashlib.sha256(name.encode() + image.convert("RGBA").tobytes()).hexdigest()
            for name, image in zip(given, images, strict=True)
        )

    def _tokens(self, width: int, height: int) -> int:
        """`smart_resize` of transformers."""
        side = self._processor["patch_size"] * self._processor["merge_size"]
        size = self._processor.get("size") or {}
        least = self._processor.get("min_pixels") or size["shortest_edge"]
        most = self._processor.get("max_pixels") or size["longest_edge"]
        if max(width, height) > 200 * min(width, height):
            raise ValueError("absolute aspect ratio must be smaller than 200")
        rows, columns = (round(length / side) * side for length in (height, width))
        if rows * columns > most:
            beta = math.sqrt(height * width / most)
            rows, columns = (max(side, math.floor(length / beta / side) * side) for length in (height, width))
        elif rows * columns < least:
            beta = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(length * beta / side) * side for length in (height, width))
        return int(rows * columns // side**2)


def _image_processor(model: Path) -> dict[str, Any]:
    """transformers has written one file for each part of a processor, and later one for all."""
    file = model / "preprocessor_config.json"
    if file.is_file():
        return dict(json.loads(file.read_text()))
    return dict(json.loads((model / "processor_config.json").read_text())["image_processor"])


def create_input_processor(model: Path, config: dict[str, Any], tokenizer: Any) -> BaseMultimodalInputProcessor:
    known = config.get("model_type") in QWEN_VL
    return (Qwen2VLInputProcessor if known else BaseMultimodalInputProcessor)(model, config, tokenizer)


def preprocess(inputs: Any, processor: BaseMultimodalInputProcessor) -> Processed:
    """A list of ids is taken as it is. TypeError for anything that is no prompt."""
    if isinstance(inputs, list) and all(isinstance(token_id, int) for token_id in inputs):
        return Processed(inputs)
    if isinstance(inputs, dict) and isinstance(inputs.get("prompt"), str):
        return processor(inputs)
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
