"""Prompts with images: vLLM takes ids with one placeholder for each image, and pixels.

vLLM keeps processed images, in a cache of `mm_processor_cache_gb`, and what its encoder makes of them, by the names
that they get here: those of a file's content and of the prompt's salt, as in the prefix cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from djl_trtllm.errors import LayoutError
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model.checkpoint import read_object
from djl_trtllm.model.vision import ScaledImages, Vision, content_name
from djl_trtllm.request import Image, Sampling


class ImagePrompts:
    """The prompts of a model in `directory`. `engine` is vLLM's LLMEngine."""

    def __init__(self, directory: Path, engine: Any) -> None:
        vision = Vision.find(directory, read_object(directory / "config.json", LayoutError))
        if vision is None:
            raise ValueError(f"{directory} does not say how its model takes images")
        self._vision = vision
        self._scaled = ScaledImages(vision)
        self._render = engine.input_processor.renderer.render_cmpl
        self.forget = engine.reset_mm_cache
        """Empties the cache. Needed where a request ends between `prompt` and `add_request`: vLLM keeps one half of the
        cache for each, and they have to see the same images."""

    def prompt(self, request: Submit) -> dict[str, Any]:
        """The prompt as vLLM's input processor takes it. Raises ValueError, and what vLLM raises."""
        salt, images = request.cache_salt, request.images
        names = [content_name(image.data, salt) for image in images]
        given: dict[str, Any] = {
            "prompt_token_ids": self._vision.collapsed(request.prompt_ids, [image.tokens for image in images]),
            "multi_modal_data": {"image": [self._scaled.pixels(image.data, salt) for image in images]},
            "multi_modal_uuids": {"image": names},
        }
        rendered: dict[str, Any]
        (rendered,) = self._render([given | ({"cache_salt": salt} if salt else {})])
        if rendered["prompt_token_ids"] != list(request.prompt_ids):
            raise ValueError("vLLM's processor makes other tokens of its images than the server has counted")
        return rendered

    def first(self) -> Submit:
        """A request with a small image, for warming up."""
        ids, file, side = self._vision.example()
        return Submit(0, ids, Sampling(2), images=(Image(file, side, side, self._vision.tokens(side, side)),))
