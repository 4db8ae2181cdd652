"""Prompts of a model that takes images: TensorRT-LLM gets all of them as text, as from its own server.

Its processor of images makes ids and pixels of a text (`call_with_text_prompt` in `_torch/models/modeling_qwen2vl.py`,
1.2 to 1.4), and turns ids into text before that. It also gives each token the position that the model's rotary
embedding reads. A prompt of ids without images has no such positions, and beside others in a batch it gives those of
one request to another (TensorRT-LLM #16944, merged for 1.4). So it comes as text, too.

Blocks of the KV cache have the ids of their tokens, which are the same for all images, the images' hashes, and a salt.
From the first request with images on, `multimodal_hashing_supported` says whether there are hashes. Until June 2026
they are of pixels without the image's size (#14603). Names of images, which go into the hashes, came with 1.3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from djl_trtllm.backends.tensorrt_llm.names import has
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.executor import images
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model.vision import content_name


class ImagePrompts(images.ImagePrompts):
    """The `executor.images.ImagePrompts` of TensorRT-LLM. `llm` is TensorRT-LLM's LLM, of this `version`."""

    def __init__(self, directory: Path, llm: Any, version: str) -> None:
        super().__init__(directory)
        self._llm = llm
        self._named = has("TextPrompt", "multi_modal_uuids", version)

    def prompt(self, request: Submit, pictures: list[Any]) -> dict[str, Any]:
        """The prompt with what `pictures` has read, as `generate_async` takes it."""
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        prompt: dict[str, Any] = {"prompt": self._llm.tokenizer.decode(self.collapsed(request), **plain)}
        if request.images:
            prompt["multi_modal_data"] = {"image": pictures}
            if self._named:
                prompt["multi_modal_uuids"] = {"image": self.names(request)}
        return prompt

    def salt(self, request: Submit) -> str:
        """The salt of a prompt: of its images too, unless TensorRT-LLM is known to hash their names."""
        hashed = getattr(self._llm.input_processor, "multimodal_hashing_supported", None)
        if not request.images or (self._named and hashed):
            return request.cache_salt
        return content_name("".join(self.names(request)).encode(), request.cache_salt)

    def check(self, request: Submit, given: list[int]) -> None:
        """Raise InvalidRequestError if TensorRT-LLM has made other tokens of the prompt than the server has counted.

        Before 1.4 the tokens of images are an id beyond the vocabulary.
        """
        placeholder, expected = self.vision.placeholder, request.prompt_ids
        if len(given) != len(expected) or any(
            theirs != ours for theirs, ours in zip(given, expected, strict=True) if ours != placeholder
        ):
            raise InvalidRequestError(
                "the prompt's tokens are not those of a text, and TensorRT-LLM takes the prompts of models with "
                "images as text: send messages or a text"
            )
