from __future__ import annotations

from typing import Any

from vllm.inputs.llm import TokensPrompt

MARK, TOKENS = 2046, 4


class ProcessorCache(list[str]):
    """The names of images, as vLLM's two caches have them."""

    def invalidate(self, mm_hash: str) -> None:
        self[:] = [each for each in self if each != mm_hash]


class BaseRenderer:
    """Each MARK of a prompt becomes four."""

    def __init__(self) -> None:
        self.cached = self.mm_processor_cache = ProcessorCache()

    def render_cmpl(self, prompts: list[TokensPrompt]) -> list[dict[str, Any]]:
        (prompt,) = prompts
        names = prompt["multi_modal_uuids"]["image"]
        assert len(names) == len(prompt["multi_modal_data"]["image"])
        self.cached += names
        ids = [each for id_ in prompt["prompt_token_ids"] for each in [id_] * (TOKENS if id_ == MARK else 1)]
        return [{**prompt, "type": "multimodal", "prompt_token_ids": ids, "mm_hashes": {"image": names}}]
