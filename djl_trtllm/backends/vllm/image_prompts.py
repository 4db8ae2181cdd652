"""Prompts with images: vLLM takes ids with one placeholder for each image, and pixels.

vLLM keeps processed images, in a cache of `mm_processor_cache_gb`, and what its encoder makes of them, by the names
that they get here: those of a file's content and of the prompt's salt, as in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from djl_trtllm.executor import images
from djl_trtllm.executor.protocol import Submit

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


class ImagePrompts(images.ImagePrompts):
    """The `executor.images.ImagePrompts` of vLLM. `engine` is vLLM's LLMEngine."""

    def __init__(self, directory: Path, engine: Any) -> None:
        super().__init__(directory)
        self._renderer = engine.input_processor.renderer
        self._empty = engine.reset_mm_cache

    def prompt(self, request: Submit, pictures: Sequence[Picture]) -> dict[str, Any]:
        """The prompt as vLLM's input processor takes it. Raises ValueError, and what vLLM raises."""
        given: dict[str, Any] = {
            "prompt_token_ids": self.collapsed(request),
            "multi_modal_data": {"image": pictures},
            "multi_modal_uuids": {"image": self.names(request)},
        }
        if request.cache_salt:
            given["cache_salt"] = request.cache_salt
        rendered: dict[str, Any]
        try:
            (rendered,) = self._renderer.render_cmpl([given])
        except Exception:
            self._empty()  # it is not known how far vLLM came
            raise
        if rendered["prompt_token_ids"] != list(request.prompt_ids):
            self.forget(rendered)
            raise ValueError("vLLM's processor makes other tokens of its images than the server has counted")
        return rendered

    def forget(self, prompt: Mapping[str, Any]) -> None:
        """Take the images of a prompt out of vLLM's cache: its request ended between `prompt` and `add_request`.

        vLLM has a cache on each side (input processor and core), and both have to see the same images. A version that
        cannot remove one image removes all.
        """
        invalidate = getattr(getattr(self._renderer, "mm_processor_cache", None), "invalidate", None)
        if invalidate is None:
            self._empty()
        else:
            for name in prompt.get("mm_hashes", {}).get("image", ()):
                invalidate(name)
